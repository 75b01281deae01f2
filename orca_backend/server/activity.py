"""Something that takes a while, shown while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def activity(text: str, console: Console) -> Iterator[None]:
    """Show `text` with a spinner and the seconds that have passed, or as a line where `console` is no terminal."""
    if not console.is_terminal:
        console.print(f"{text} ...", highlight=False, markup=False, soft_wrap=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield
