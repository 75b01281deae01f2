"""`Histogram`: counts of observed values, kept here and given away in bulk.

A call into Triton's metrics takes some 60 µs, whether it observes one value or increments a counter by a thousand
(measured in the stub). So a histogram is published as what it is made of, counters: `name_bucket` with the label `le`,
`name_sum` and `name_count`. Every observation counts, and the calls per tick are as many as there are buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Observations since they were last taken, by upper bound. Not safe for threads by itself."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        """`bounds` ascend; one more bucket takes what is beyond the last."""
        self.name = name
        self._bounds = bounds
        self._labels = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        self._clear()

    def _clear(self) -> None:
        self._counts = [0] * len(self._labels)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, as often as it was seen."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def counters(self) -> Iterator[tuple[str, Iterable[str]]]:
        """The counters that it is published as: name, and the values of the label `le` ("" for none)."""
        yield f"{self.name}_bucket", self._labels
        yield f"{self.name}_sum", ("",)
        yield f"{self.name}_count", ("",)

    def take(self) -> Iterator[tuple[tuple[str, str], float]]:
        """By how much each counter has grown since the last time, as ((name, le), increment)."""
        counts, total = self._counts, self._sum
        if not any(counts):
            return
        self._clear()
        for label, below in zip(self._labels, accumulate(counts), strict=True):
            yield (f"{self.name}_bucket", label), below
        yield (f"{self.name}_sum", ""), total
        yield (f"{self.name}_count", ""), sum(counts)
