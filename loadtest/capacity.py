"""The highest rate that a server sustains within an SLO, found by bisection under rules like MLPerf's server scenario.

Poisson arrivals; latencies count from when a request was due; every probe lasts a minimum time and has a minimum number
of requests; every request due after the warm-up counts, a failed one as never answered. A probe passes if both
percentiles are within their limits, and if answers end as fast as requests come: a server that falls behind may keep an
SLO for a minute, but not for long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.measurement import Measurement, Target, measure
from loadtest.summary import Slo, Summary
from loadtest.workload import Arrivals, Workload

WARMUP_SHARE = 0.1  # of a probe
SUSTAINED = 0.9  # of the offered rate: what the throughput must be at least
NARROW = 1.25  # where a search begins that knows an earlier result: so far below and above it


@dataclass(frozen=True)
class Rules:
    """When a probe counts and when the search ends: `tolerance` is the relative width of the last interval."""

    slo: Slo
    min_seconds: float = 60.0
    min_requests: int = 100
    tolerance: float = 0.05
    max_streams: int = 64  # of the closed loop that bounds the search from above

    def count(self, rate: float) -> int:
        """Requests of a probe at `rate`, those of the warm-up included."""
        return math.ceil(max(self.min_seconds * rate, self.min_requests) / (1 - WARMUP_SHARE)) + 1


@dataclass
class Search:
    """One search: `probes` (rate, numbers, whether it passed) in the order in which they ran."""

    probes: list[tuple[float, Summary, bool]] = field(default_factory=list)
    best: Measurement | None = None

    @property
    def rate(self) -> float:
        """The capacity in requests/s: the highest rate that passed, 0 if none did."""
        return max((rate for rate, _, passed in self.probes if passed), default=0.0)


def bisect(passes: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """The highest rate for which `passes`, given that rates below it do and rates above it do not.

    `low` and `high` are where it is expected; both are moved until they hold it between them (`low` at most ten times:
    then 0 is returned).
    """
    bounded = False  # whether `high` is known to fail
    for _ in range(10):
        if passes(low):
            break
        low, high, bounded = low / 2, low, True
    else:
        return 0.0
    while not bounded and passes(high):
        low, high = high, 2 * high
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


class CapacityTest:
    """Searches on one target, one workload."""

    def __init__(
        self, target: Target, workload: Workload, rules: Rules, say: Callable[[str], None], *, seed: int = 0
    ) -> None:
        """`say` is told of every probe."""
        self._target = target
        self._workload = workload
        self._rules = rules
        self._say = say
        self._seed = seed
        self._last = 0.0

    def saturated(self, among: int = 0) -> float:
        """Requests/s of a closed loop that keeps the server full: no rate above it can be sustained.

        The first requests of the workload, or as many from all over its first `among`.
        """
        rules = self._rules
        enough = max(rules.min_requests, 2 * rules.max_streams)
        sessions = self._workload.sessions(max(enough, among), Arrivals(kind="closed"), self._seed)
        sessions = sessions[:: len(sessions) // enough]
        loaded = measure(self._target, sessions, streams=rules.max_streams)
        return len(sessions) / loaded.outcome.wall

    def search(self) -> Search:
        """Find the capacity; after the first time, begin around the last result."""
        found = Search()

        def passes(rate: float) -> bool:
            sessions = self._workload.sessions(self._rules.count(rate), Arrivals(rate=rate), self._seed)
            last = sessions[-1].at or 0.0
            measurement = measure(self._target, sessions, warmup=WARMUP_SHARE * last, slo=self._rules.slo)
            summary = measurement.summary
            passed = summary.meets_slo and summary.throughput >= SUSTAINED * summary.offered
            if passed and rate >= found.rate:
                found.best = measurement
            found.probes.append((rate, summary, passed))
            p99 = [1e3 * summary.latency(name).percentiles[99] for name in ("ttft", "tpot")]
            self._say(
                f"{rate:.3g} requests/s: {'passed' if passed else 'failed'} (p99 of TTFT {p99[0]:.0f} ms, of TPOT "
                f"{p99[1]:.0f} ms; {summary.attainment:.1%} of requests within both limits; "
                f"{summary.offered:.3g} requests/s came, {summary.throughput:.3g} were answered)"
            )
            return passed

        if self._last:
            low, high = self._last / NARROW, self._last * NARROW
        else:
            high = self.saturated()
            low = high / 2
            self._say(f"saturated: {high:.3g} requests/s")
        self._last = bisect(passes, low, high, self._rules.tolerance) or self._last
        return found


def compare(a: CapacityTest, b: CapacityTest, rounds: int) -> tuple[list[Search], list[Search], list[float]]:
    """Searches in the order A B A B ..., and the ratio B / A of every round (NaN where A sustains nothing)."""
    of_a, of_b = [], []
    for _ in range(rounds):
        of_a.append(a.search())
        of_b.append(b.search())
    return of_a, of_b, [y.rate / x.rate if x.rate else math.nan for x, y in zip(of_a, of_b, strict=True)]
