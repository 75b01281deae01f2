"""A priority queue of sequences from which any of them can be taken out, and put back with another key."""

from __future__ import annotations

import heapq

from orca_backend.request import Sequence


class LazyHeap:
    """Smallest key first, then earliest arrival. A sequence is in it at most once. O(log n), amortised.

    Entries that were taken out of the middle stay in the heap until they come up, or are the greater half of it.
    """

    def __init__(self) -> None:
        """An empty queue."""
        self._heap: list[tuple[float, int, Sequence]] = []
        self._keys: dict[int, float] = {}  # by arrival, of those that are really there

    def __len__(self) -> int:
        """Sequences in the queue."""
        return len(self._keys)

    def push(self, key: float, seq: Sequence) -> None:
        """Put `seq` in, or move it to another key."""
        if self._keys.get(seq.arrival) != key:
            self._keys[seq.arrival] = key
            heapq.heappush(self._heap, (key, seq.arrival, seq))

    def first(self) -> tuple[float, Sequence] | None:
        """The smallest key and its sequence."""
        heap, keys = self._heap, self._keys
        while heap:
            key, arrival, seq = heap[0]
            if keys.get(arrival) == key:
                return key, seq
            heapq.heappop(heap)
        return None

    def discard(self, seq: Sequence) -> None:
        """Take `seq` out, if it is there."""
        if self._keys.pop(seq.arrival, None) is None:
            return
        if len(self._heap) > 2 * len(self._keys) + 16:
            self._heap = [entry for entry in self._heap if self._keys.get(entry[1]) == entry[0]]
            heapq.heapify(self._heap)
