"""What the flight recorder of an engine writes, and how it is read: one JSON object a line, told apart by `type`.

First the `Recording`, then every `Request` that was there, then every `Iteration`, in the order in which they returned.
Times are values of time.monotonic() in seconds; `Recording.monotonic` and `Recording.unix` are the same instant.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from orca_backend.scheduler.iteration import Row


class Recording(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="recording"):
    """The engine that recorded, when it wrote this, and why."""

    model: str
    policy: str
    pid: int
    reason: str
    monotonic: float
    unix: float


class RequestRecord(msgspec.Struct, kw_only=True, tag_field="type", tag="request"):
    """One request: what it asked for, when it came, and how it ended if it did. Lengths in tokens."""

    id: int
    arrived: float
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    tenant: str = ""
    ended: float | None = None
    end: str = ""  # its finish reason

    def ended_by(self, time: float) -> bool:
        """Whether it had ended at that time."""
        return self.ended is not None and self.ended <= time


class IterationRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="iteration"):
    """One iteration: when it was scheduled and had returned, what ran in it, and how full the engine then was.

    `joined`, `left`, `cancelled` and `preempted` are ids of requests. Those that `joined` had their first row in this
    iteration, or their first one after they were preempted; the others went since the iteration before. `cancelled` are
    among those that `left`. `slots_*` are tokens.
    `failed` says why none of its rows has a token.
    """

    id: int
    policy: str
    scheduled: float
    returned: float
    schedule_seconds: float
    run_seconds: float
    rows: list[Row]
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    slots_reserved: int
    slots_used: int
    slots_total: int
    joined: list[int] = []
    left: list[int] = []
    cancelled: list[int] = []
    preempted: list[int] = []
    failed: str = ""


Record = Recording | RequestRecord | IterationRecord

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


@dataclass(frozen=True)
class Flight:
    """A recording as it is read: requests by id, iterations in the order in which they returned."""

    recording: Recording
    requests: dict[int, RequestRecord]
    iterations: list[IterationRecord]

    def window(
        self,
        iterations: tuple[int | None, int | None] = (None, None),
        seconds: tuple[float | None, float | None] = (None, None),
    ) -> Sequence[IterationRecord]:
        """The iterations with first <= id <= last, scheduled between two times since the first one on record."""
        begin = self.iterations[0].scheduled if self.iterations else 0.0
        return [
            record
            for record in self.iterations
            if _within(record.id, iterations) and _within(record.scheduled - begin, seconds)
        ]


def _within(value: float, limits: tuple[float | None, float | None]) -> bool:
    low, high = limits
    return (low is None or low <= value) and (high is None or value <= high)


def recording_path(directory: str | Path, pid: int, *, failure: bool = False) -> Path:
    """Where the engine with process id `pid` writes its recordings."""
    return Path(directory) / f"orca-recording-{pid}{'-failure' if failure else ''}.jsonl"


def write(records: Iterable[Record], path: Path) -> None:
    """Write a file that is there as a whole or not at all. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(_encoder.encode_lines(records if isinstance(records, list) else list(records)))
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read(path: Path) -> Flight:
    """Read a file. Raises OSError, or ValueError if it is not a recording."""
    try:
        first, *others = _decoder.decode_lines(path.read_bytes())
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{path} is not a recording of an engine: {error}") from error
    if not isinstance(first, Recording):
        raise ValueError(f"{path} is not a recording of an engine: it begins with a {type(first).__name__}")
    requests = {record.id: record for record in others if isinstance(record, RequestRecord)}
    return Flight(first, requests, [record for record in others if isinstance(record, IterationRecord)])
