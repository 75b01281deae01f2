"""Which requests can no longer be served in time, and when that is to be looked at."""

from __future__ import annotations

import math

from orca_backend.request import Sequence, State
from orca_backend.scheduler.lazy_heap import LazyHeap


class Deadlines:
    """Times in seconds of one clock. A sequence is too late when its deadline would pass before its expected tokens.

    These are at least one, and more only if the request says so by its hint or by min_tokens; each is taken to cost
    an iteration, at the pace of the fastest of late. A sequence that has not started in `max_queue_seconds` (None: no
    limit) is too late as well.
    """

    def __init__(self, max_queue_seconds: float | None) -> None:
        """Nobody has a deadline."""
        self._limit = math.inf if max_queue_seconds is None else max_queue_seconds
        self._heap = LazyHeap()  # by the time at which to look
        self._pace = 0.0  # seconds; forgets one per cent per iteration

    @property
    def next(self) -> float:
        """When to look next; infinity: never."""
        first = self._heap.first()
        return first[0] if first else math.inf

    def observe(self, seconds: float) -> None:
        """An iteration has returned after so long."""
        self._pace = min(seconds, self._pace * 1.01) if self._pace else seconds

    def watch(self, seq: Sequence) -> float:
        """Look at `seq` when by what is known now it would be too late; that time."""
        request, due = seq.request, math.inf
        if request.deadline is not None:
            expected = request.expected_tokens or request.sampling.min_tokens
            due = request.deadline - max(1, expected - len(seq.output_ids)) * self._pace
        if seq.state is State.INITIATION:
            due = min(due, seq.arrival_time + self._limit)
        if due < math.inf:
            self._heap.push(due, seq)
        else:
            self._heap.discard(seq)
        return due

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended."""
        self._heap.discard(seq)

    def expire(self, now: float) -> list[tuple[Sequence, str]]:
        """Those that are too late, with the reason; they are not watched any more."""
        late = []
        while (first := self._heap.first()) and first[0] <= now:
            seq = first[1]
            if (due := self.watch(seq)) > now:
                continue  # it has come nearer to its end meanwhile
            self._heap.discard(seq)
            why = "its deadline cannot be met"
            if due == seq.arrival_time + self._limit:
                why = f"it was not started within {self._limit:g} seconds"
            late.append((seq, f"Request timeout expired: {why}"))
        return late
