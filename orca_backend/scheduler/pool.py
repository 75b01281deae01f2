"""The request pool (paper section 4.2): every sequence that has been submitted and has not ended."""

from __future__ import annotations

from collections.abc import Iterator

from orca_backend.request import Request, Sequence, State
from orca_backend.scheduler.order import Queue


class RequestPool:
    """Sequences by id: those that wait, in the queue of an order, apart from those that have started.

    Keeping the two apart lets an iteration cost O(started), however many wait. `started` is in the order of starting,
    which under FCFS without preemption is the order of arrival.
    """

    def __init__(self, waiting: Queue) -> None:
        """An empty pool."""
        self.waiting = waiting
        self.started: dict[int, Sequence] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Sequences that have not left."""
        return len(self._sequences)

    def __contains__(self, request_id: int) -> bool:
        """Whether this request has been submitted and has not left."""
        return request_id in self._sequences

    def get(self, request_id: int) -> Sequence | None:
        """The sequence of this request, if it has not left."""
        return self._sequences.get(request_id)

    def insert(self, request: Request, now: float) -> Sequence:
        """Let `request` wait. The arrival is stamped here, so that arrival order is insertion order."""
        seq = self._sequences[request.request_id] = Sequence(request, self._arrivals, now)
        self._arrivals += 1
        seq.rank = self.waiting.rank(seq)
        self.waiting.push(seq)
        return seq

    def ready(self) -> Iterator[Sequence]:
        """Started sequences that are in no iteration in flight. `started` must not change meanwhile."""
        running = State.RUNNING  # looked up once: on the enum that is slow
        return (seq for seq in self.started.values() if seq.state is not running)

    def start(self, seq: Sequence) -> None:
        """Count `seq`, which waits, among the started."""
        self.waiting.discard(seq)
        self.started[seq.request_id] = seq

    def stop(self, seq: Sequence) -> None:
        """Let `seq`, which has started, wait again."""
        del self.started[seq.request_id]
        self.waiting.push(seq)

    def remove(self, seq: Sequence) -> None:
        """Let `seq` leave."""
        del self._sequences[seq.request_id]
        if self.started.pop(seq.request_id, None) is None:
            self.waiting.discard(seq)
