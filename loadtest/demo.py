"""Eight chats of different lengths stream at once from one real server, joining and leaving the batch as they please.

In a terminal a live view shows every answer grow; elsewhere, a line for each request that joins or leaves. Then a
summary, with what the server counted. The exit code is 0 only if every answer is complete and not empty.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.server_metrics import Metrics
from orca_backend.cli import PORTS, SET_HELP, curl_command
from orca_backend.config import ConfigError
from orca_backend.server import ServerError, TritonServer, activity
from orca_backend.server.repository import parse_overrides
from orca_client import AsyncOrcaClient, Message, OrcaError, SamplingOptions, TextDelta

REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"
MODEL = "orca"
STAGGER_S = 0.4  # between arrivals: late ones join while early ones are in mid-answer
ANSWER_TIMEOUT_S = 300.0
METRICS_PATIENCE_S = 5.0  # the server publishes its metrics twice a second

# Prompt, and the most tokens to answer with: long and short ones in turn, so that late requests overtake early ones.
# A small model answers these well, and ends by itself before the limit.
CHATS = [
    ("What is photosynthesis?", 160),
    ("What is the capital of France?", 24),
    ("What is an orca?", 144),
    ("Name five fruits.", 40),
    ("What is gravity?", 112),
    ("Name the months of the year.", 48),
    ("List the four seasons.", 64),
    ("What is the largest ocean on Earth?", 40),
]
PROMPT_WIDTH, STATE_WIDTH, TOKENS_WIDTH = 30, 8, 7
TABLE_LINES_WIDTH = 13  # the lines between four columns, and a space on both sides of each
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
STATE_STYLES = {"to come": "dim", "waiting": "yellow", "running": "green", "done": "blue", "failed": "bold red"}


@dataclass
class Chat:
    """One request and what is known of it. Times are values of time.perf_counter()."""

    number: int
    prompt: str
    max_tokens: int
    state: str = "to come"
    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    sent: float = 0.0
    first: float = 0.0
    end: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer came, and there is something in it."""
        return self.state == "done" and bool(self.text.strip())


async def ask(client: AsyncOrcaClient, chat: Chat, changed: Callable[[Chat], None]) -> None:
    """Send `chat` when its time has come and follow its answer, calling `changed` whenever its state changes."""

    def enter(state: str) -> None:
        chat.state = state
        changed(chat)

    await asyncio.sleep(chat.number * STAGGER_S)
    chat.sent = time.perf_counter()
    enter("waiting")
    messages: list[Message] = [{"role": "user", "content": chat.prompt}]
    sampling: SamplingOptions = {"max_tokens": chat.max_tokens, "temperature": 0.0}
    try:
        async for event in client.stream_chat(messages, model=MODEL, timeout=ANSWER_TIMEOUT_S, **sampling):
            if isinstance(event, TextDelta):
                chat.text += event.text
                chat.num_tokens += event.num_tokens
                if not chat.first:
                    chat.first = time.perf_counter()
                    enter("running")
            else:
                chat.finish_reason = event.finish_reason
    except OrcaError as error:
        chat.error = str(error)
    chat.end = time.perf_counter()
    enter("failed" if chat.error else "done")


def beginning(text: str, width: int) -> str:
    """The first words of `text` that fit into `width` characters, and an ellipsis where there are more."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    words = text[: max(0, width - len(ELLIPSIS))].rpartition(" ")[0]
    return f"{words} {ELLIPSIS}" if words else ELLIPSIS


def end(text: str, width: int) -> str:
    """The last words of `text` that fit into `width` characters, after an ellipsis where there are more."""
    return beginning(text[::-1], width)[::-1]


class LiveView:
    """One row per chat, redrawn a few times a second."""

    def __init__(self, chats: list[Chat], console: Console) -> None:
        self._chats = chats
        self._console = console
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=10)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)  # type: ignore[arg-type]

    def changed(self, chat: Chat) -> None:
        """Nothing to do: the next redrawing shows it."""

    def _table(self) -> Table:
        states = [chat.state for chat in self._chats]
        counts = ", ".join(f"{states.count(state)} {state}" for state in STATE_STYLES if state in states)
        table = Table(title=f"{len(self._chats)} requests: {counts}", expand=True)
        table.add_column("request", no_wrap=True, width=PROMPT_WIDTH, style="bold")
        table.add_column("state", no_wrap=True, width=STATE_WIDTH)
        table.add_column("tokens", justify="right", width=TOKENS_WIDTH)
        table.add_column("answer", no_wrap=True, ratio=1)
        width = self._console.width - PROMPT_WIDTH - STATE_WIDTH - TOKENS_WIDTH - TABLE_LINES_WIDTH
        for chat in self._chats:
            shown = chat.error or (beginning if chat.state == "done" else end)(chat.text, width)
            table.add_row(
                Text(chat.prompt),
                Text(chat.state, STATE_STYLES[chat.state]),
                f"{chat.num_tokens}/{chat.max_tokens}",
                Text(shown),
            )
        return table


class PlainView:
    """One line for each request that arrives, joins or leaves, and the answer when it is whole."""

    def __init__(self, chats: list[Chat], console: Console) -> None:
        self._chats = chats
        self._console = console

    def __enter__(self) -> PlainView:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to tidy up."""

    def changed(self, chat: Chat) -> None:
        """Print the line."""
        running = sum(other.state == "running" for other in self._chats)
        what = {
            "waiting": f"arrives: {chat.prompt}",
            "running": "joins",
            "done": f"leaves after {chat.num_tokens} tokens ({chat.finish_reason}): {' '.join(chat.text.split())}",
            "failed": f"fails: {chat.error}",
        }[chat.state]
        now = time.perf_counter() - self._start
        line = f"{now:6.2f} s  {running} running  request {chat.number + 1} {what}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


async def converse(url: str, chats: list[Chat], console: Console) -> None:
    """All chats, at once, shown as they go."""
    view = (LiveView if console.is_terminal else PlainView)(chats, console)
    async with AsyncOrcaClient(url) as client:
        with view:
            await asyncio.gather(*(ask(client, chat, view.changed) for chat in chats))


def read_metrics(url: str, num_tokens: int) -> Metrics:
    """The metrics, once they account for `num_tokens` generated tokens (or as they are, after a while)."""
    deadline = time.monotonic() + METRICS_PATIENCE_S
    while True:
        metrics = Metrics.read(url)
        if metrics.total("vllm:generation_tokens_total") >= num_tokens or time.monotonic() > deadline:
            return metrics
        time.sleep(0.1)


def summary(chats: list[Chat], metrics: Metrics) -> Table:
    """What came out, seen from the client, and how the batch was made up, counted by the server."""
    answered = [chat for chat in chats if chat.first]
    waits = [chat.first - chat.sent for chat in answered] or [float("nan")]
    num_tokens = sum(chat.num_tokens for chat in chats)
    seconds = max(chat.end for chat in chats) - min(chat.sent for chat in chats)
    iterations = metrics.total("orca_iterations_total")
    mixed = metrics.total("orca_iterations_total", 'kind="mixed"')
    batches = metrics.total("orca_iteration_batch_size_count")
    mean_batch = metrics.total("orca_iteration_batch_size_sum") / batches if batches else float("nan")
    table = Table(title="Summary", show_header=False)
    for name, value in (
        ("requests complete", f"{sum(chat.is_complete for chat in chats)} of {len(chats)}"),
        ("tokens generated", f"{num_tokens} in {seconds:.1f} s"),
        ("tokens/s, all requests together", f"{num_tokens / seconds:.1f}"),
        ("time to first token, median", f"{statistics.median(waits):.3f} s"),
        ("time to first token, longest", f"{max(waits):.3f} s"),
        ("iterations", f"{iterations:.0f}"),
        ("requests per iteration, mean", f"{mean_batch:.2f}"),
        ("iterations with prefill and decode", f"{mixed:.0f} (requests that joined while others were in mid-answer)"),
    ):
        table.add_row(name, value)
    return table


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=SET_HELP,
    )
    args = parser.parse_args()
    console = Console()
    chats = [Chat(number, prompt, max_tokens) for number, (prompt, max_tokens) in enumerate(CHATS)]
    try:
        server = TritonServer(
            REPOSITORY, models=[MODEL], overrides=parse_overrides(args.settings), name="demo", console=console
        )
        with server:
            asyncio.run(converse(server.grpc_url, chats, console))
            console.print(summary(chats, read_metrics(server.metrics_url, sum(chat.num_tokens for chat in chats))))
            with activity("Stopping the server", console):
                server.stop()
        url = f"http://127.0.0.1:{PORTS['http']}"
        next_step = f"Now yours: make serve, and in another terminal\n  {curl_command(url, MODEL)}"
        console.print(next_step, markup=False, highlight=False, soft_wrap=True)
    except (ConfigError, ServerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if all(chat.is_complete for chat in chats) else 1


if __name__ == "__main__":
    sys.exit(main())
