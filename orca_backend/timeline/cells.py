"""What every request did in every iteration: the cells of a timeline, requests as rows and iterations as columns."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from orca_backend.scheduler.iteration import Row
from orca_backend.timeline.recording import Flight, IterationRecord, RequestRecord


class Cell(enum.Enum):
    """What a request does in an iteration; the value is its character in a timeline of text."""

    WAITING = "."
    PREFILL = "P"
    CHUNK = "c"
    DECODE = "d"
    IDLE = "-"
    PREEMPTED = "!"
    INACTIVE = "x"

    @property
    def meaning(self) -> str:
        """In words, for a legend."""
        return _MEANINGS[self]


_MEANINGS = {
    Cell.WAITING: "waits to be started",
    Cell.PREFILL: "prefill: its whole prompt",
    Cell.CHUNK: "a chunk of its prompt",
    Cell.DECODE: "decode: one token",
    Cell.IDLE: "not in this iteration",
    Cell.PREEMPTED: "preempted",
    Cell.INACTIVE: "ended, but kept in its batch",
}


def cells(flight: Flight, window: Sequence[IterationRecord]) -> dict[int, list[Cell | None]]:
    """One list per request that was there in the window, in order of arrival: a cell per iteration, None if absent."""
    columns = {record.id: column for column, record in enumerate(window)}
    requests = sorted(flight.requests.values(), key=lambda request: (request.arrived, request.id))
    grid: dict[int, list[Cell | None]] = {request.id: [None] * len(window) for request in requests}
    computed: dict[int, int] = {}  # tokens after the last row, of those that have had one
    preempted: set[int] = set()
    for record in flight.iterations:  # also those before the window: what a row is depends on the one before
        for request_id in record.preempted:
            preempted.add(request_id)
            computed.pop(request_id, None)
        kinds = {row.request_id: _kind(row, flight.requests.get(row.request_id), computed) for row in record.rows}
        preempted.difference_update(kinds)
        computed.update((row.request_id, row.start + row.num_tokens) for row in record.rows)
        if (column := columns.get(record.id)) is None:
            continue
        for request in requests:
            if request.id in kinds:
                grid[request.id][column] = kinds[request.id]
            elif request.arrived <= record.scheduled and not request.ended_by(record.scheduled):
                absent = Cell.IDLE if request.id in computed else Cell.WAITING
                grid[request.id][column] = Cell.PREEMPTED if request.id in preempted else absent
    return {request_id: row for request_id, row in grid.items() if any(row)}


def _kind(row: Row, request: RequestRecord | None, computed: dict[int, int]) -> Cell:
    """What `row` is. One that samples nothing and computes what is there already is of a request that has ended."""
    before = computed.get(row.request_id)
    if not row.sample and before is not None and row.start < before:
        return Cell.INACTIVE
    if row.sample and row.num_tokens == 1 and row.start >= (request.prompt_tokens if request else 1):
        return Cell.DECODE
    # What does not begin at the start may also follow a prefix that was found in the cache.
    return Cell.PREFILL if row.sample and before is None else Cell.CHUNK


def only_wait(row: Sequence[Cell | None]) -> bool:
    """Whether a request does nothing but wait to be started: under overload most do, and one need not see them all."""
    return set(row) <= {None, Cell.WAITING}
