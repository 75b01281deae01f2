"""A recording in the trace event format of Chrome, which Perfetto (ui.perfetto.dev) shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orca_backend.timeline.cells import Cell, cells
from orca_backend.timeline.recording import Flight, IterationRecord

Event = dict[str, Any]

_ENGINE, _REQUESTS = 1, 2  # processes of the trace
_LASTING = (Cell.WAITING, Cell.PREEMPTED, Cell.IDLE)  # states that last, rather than work of one iteration


def write_trace(flight: Flight, window: Sequence[IterationRecord], path: Path) -> None:
    """Write the iterations of the window. Raises OSError."""
    path.write_bytes(msgspec.json.encode({"traceEvents": list(trace_events(flight, window)), "displayTimeUnit": "ms"}))


def trace_events(flight: Flight, window: Sequence[IterationRecord]) -> Iterator[Event]:
    """The engine is one process, with a track for the scheduler and one for each iteration in flight, and counters.

    The requests are another, with a track each: one slice per iteration that it ran in, and one for as long as it
    waited, was preempted or was left out. Arrows would hide them: where a request joins or leaves, its slices begin or
    end. Times are in microseconds since the first iteration on record.
    """
    begin = flight.iterations[0].scheduled if flight.iterations else 0.0

    def slice_(name: str, process: int, track: int, start: float, end: float, **arguments: Any) -> Event:
        times = {"ts": 1e6 * (start - begin), "dur": 1e6 * max(end - start, 0.0)}
        return {"ph": "X", "name": name, "pid": process, "tid": track, **times, "args": arguments}

    yield from _names(flight)
    lanes: list[float] = []  # when the last iteration on each track ended
    for record in window:
        run_from = max(record.returned - record.run_seconds, record.scheduled)
        lane = next((i for i, end in enumerate(lanes) if end <= run_from), len(lanes))
        lanes[lane : lane + 1] = [record.returned]
        facts = {name: value for name, value in msgspec.to_builtins(record).items() if name not in ("rows", "type")}
        name = f"iteration {record.id}: {len(record.rows)} requests, {record.prefill_tokens} + {record.decode_tokens}"
        yield slice_("schedule", _ENGINE, 0, record.scheduled, record.scheduled + record.schedule_seconds, id=record.id)
        yield slice_(name, _ENGINE, 1 + lane, run_from, record.returned, **facts)
        for counter, values in (
            ("K/V slots", {"used": record.slots_used, "reserved": record.slots_reserved - record.slots_used}),
            ("requests", {"running": record.running, "waiting": record.waiting}),
            ("tokens", {"prefill": record.prefill_tokens, "decode": record.decode_tokens}),
        ):
            yield {"ph": "C", "name": counter, "pid": _ENGINE, "ts": 1e6 * (record.returned - begin), "args": values}
    tokens = [{row.request_id: row.num_tokens for row in record.rows} for record in window]
    for request_id, row in cells(flight, window).items():
        lasting: tuple[Cell, float] | None = None  # a state, and since when
        for cell, record, ran in zip(row, window, tokens, strict=True):
            if lasting is not None and cell is not lasting[0]:
                yield slice_(lasting[0].meaning, _REQUESTS, request_id, lasting[1], record.scheduled)
                lasting = None
            if cell in _LASTING:
                since = record.scheduled if cell is not Cell.WAITING else flight.requests[request_id].arrived
                lasting = lasting or (cell, max(since, window[0].scheduled))
            elif cell is not None:
                name = f"{cell.name.lower()} {ran[request_id]}"
                yield slice_(name, _REQUESTS, request_id, record.scheduled, record.returned, iteration=record.id)
        if lasting is not None:
            yield slice_(lasting[0].meaning, _REQUESTS, request_id, lasting[1], window[-1].returned)


def _names(flight: Flight) -> Iterator[Event]:
    recording = flight.recording

    def named(kind: str, process: int, track: int, name: str) -> Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}

    yield named("process_name", _ENGINE, 0, f"engine: {recording.model}, {recording.policy}")
    yield named("process_name", _REQUESTS, 0, "requests")
    yield named("thread_name", _ENGINE, 0, "scheduler")
    for request in flight.requests.values():
        name = f"request {request.id}: {request.prompt_tokens} + {request.max_new_tokens} tokens {request.end}".rstrip()
        yield named("thread_name", _REQUESTS, request.id, name)
