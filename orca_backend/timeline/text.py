"""A timeline as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orca_backend.timeline.cells import Cell, cells, only_wait
from orca_backend.timeline.recording import Flight, IterationRecord

_LEVELS = " ▁▂▃▄▅▆▇█"
_TENTHS = 10  # columns from one iteration's number to the next
_NAME = 10  # characters before the cells
_END = 10  # characters after them


def columns(width: int) -> int:
    """How many iterations stand beside one another in `width` characters."""
    return max(width - _NAME - _END, _TENTHS)


def render(flight: Flight, window: Sequence[IterationRecord], width: int) -> Iterator[str]:
    """The lines of the timeline, one panel below the other where `width` characters are too few."""
    recording = flight.recording
    yield f"{recording.model}, policy {recording.policy}, process {recording.pid}, recorded because {recording.reason}"
    count = columns(width)
    grid = cells(flight, window)
    for first in range(0, len(window), count):
        panel = window[first : first + count]
        yield ""
        yield from _panel(flight, panel, {name: row[first : first + count] for name, row in grid.items()})
    yield ""
    used = {cell for row in grid.values() for cell in row}
    yield from (f"{cell.value} {cell.meaning}" for cell in Cell if cell in used)


def _panel(flight: Flight, window: Sequence[IterationRecord], grid: dict[int, list[Cell | None]]) -> Iterator[str]:
    begin = flight.iterations[0].scheduled
    yield (
        f"iterations {window[0].id} to {window[-1].id}, "
        f"{window[0].scheduled - begin:.3f} s to {window[-1].returned - begin:.3f} s"
    )
    numbers = "".join(f"{record.id:<{_TENTHS}}" for record in window[::_TENTHS])
    yield f"{'request':<{_NAME}}{numbers}".rstrip()
    hidden = 0
    for request_id, row in grid.items():
        if not any(row):
            continue
        if only_wait(row):
            hidden += 1
            continue
        end = flight.requests[request_id].end if flight.requests[request_id].ended_by(window[-1].returned) else ""
        cells_ = "".join(cell.value if cell else " " for cell in row)
        yield f"{request_id:<{_NAME}}{cells_} {end}".rstrip()
    if hidden:
        yield f"and {hidden} that only wait"
    shares = [record.slots_reserved / max(record.slots_total, 1) for record in window]
    levels = "".join(_LEVELS[round(share * (len(_LEVELS) - 1))] for share in shares)
    yield f"{'K/V':<{_NAME}}{levels} {max(shares):.0%}"
