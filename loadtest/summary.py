"""From single events to the numbers that are reported.

- TTFT: from when a request was due to its first token. In an open loop that counts all the time in which the server (or
  the generator) was not ready for it, so a stall cannot hide (no coordinated omission).
- ITL: every gap between two events of a request that brought tokens (mostly one each), as its reader sees it.
- TPOT: (end to end - TTFT) / (tokens - 1), one value a request. Averages over a request hide its stalls; ITL does not.
- Normalized latency: end to end / tokens, as in the Orca paper (which reports its median; vLLM's its mean).

What was due during the warm-up is left out. Throughput is the rate at which the answers to the rest ended: half of
them, divided by the time between the means of the earlier and of the later half of their ends. Unlike a count in a
window it is right for answers that come in bursts (whole batches), and does not charge a short run for filling up.
The offered rate is taken from the times at which requests were due in the same way.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from loadtest.load import Outcome, Record

PERCENTILES = (50, 90, 95, 99)

# A generator that takes so much of a core, or sends so late (a share of the median TTFT), is measured with the server.
BUSY_SHARE = 0.8
LATE_SHARE = 0.05


class Slo(msgspec.Struct, frozen=True):
    """Limits in seconds that `percentile` percent of all requests must keep, for TTFT and for TPOT each."""

    ttft: float = math.inf
    tpot: float = math.inf
    percentile: float = 99.0

    def __str__(self) -> str:
        """For people."""
        limits = [f"{name} {1e3 * limit:g} ms" for name, limit in (("TTFT", self.ttft), ("TPOT", self.tpot))]
        shown = [text for text in limits if "inf" not in text]
        return f"{' and '.join(shown) or 'no limit'} for {self.percentile:g} % of requests"

    def met_by(self, record: Record) -> bool:
        """Whether this request ended well and kept both limits."""
        return not record.error and ttft(record) <= self.ttft and tpot(record) <= self.tpot


class Latency(msgspec.Struct, frozen=True):
    """A distribution in seconds (of normalized latency: seconds a token). `percentiles` by PERCENTILES."""

    count: int
    mean: float
    percentiles: dict[int, float]
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Latency:
        """The distribution of `values`; NaN where there are none."""
        if not len(values):
            return cls(0, math.nan, dict.fromkeys(PERCENTILES, math.nan), math.nan)
        found = np.percentile(values, PERCENTILES)
        percentiles = dict(zip(PERCENTILES, found.tolist(), strict=True))
        return cls(len(values), float(np.mean(values)), percentiles, float(np.max(values)))

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles[50]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One load in numbers, less the warm-up before `begin`. Rates are per second, latencies in seconds."""

    begin: float
    requests: int
    failures: dict[str, int]
    offered: float
    throughput: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    goodput: float
    attainment: float
    meets_slo: bool
    latencies: dict[str, Latency]
    generator_busy: float
    warnings: list[str]

    def latency(self, name: str) -> Latency:
        """By name: ttft, itl, tpot, e2e, normalized, lateness."""
        return self.latencies[name]


def ttft(record: Record) -> float:
    """Seconds from when the request was due to its first token."""
    return record.times[0] - record.scheduled if record.times else math.inf


def tpot(record: Record) -> float:
    """Mean seconds between tokens after the first; 0 for an answer of one token or one event."""
    return (record.times[-1] - record.times[0]) / max(1, record.num_tokens - 1) if record.times else math.inf


def e2e(record: Record) -> float:
    """Seconds from when the request was due to its last token."""
    return record.times[-1] - record.scheduled if record.times else math.inf


def normalized(record: Record) -> float:
    """Seconds a token, from when the request was due."""
    return e2e(record) / record.num_tokens if record.times else math.inf


def summarize(outcome: Outcome, *, warmup: float = 0.0, slo: Slo | None = None) -> Summary:
    """The numbers of `outcome`, less what was due in the first `warmup` seconds. Raises ValueError if that was all."""
    slo = slo or Slo()
    due = [record for record in outcome.records if record.scheduled >= warmup]
    if not due:
        raise ValueError(f"no request was due after the warm-up of {warmup:g} s")
    good = [record for record in due if not record.error]
    throughput = completion_rate([record.times[-1] for record in good])
    values = {
        "ttft": [ttft(record) for record in good],
        "itl": [b - a for record in good for a, b in pairwise(record.times)],
        "tpot": [tpot(record) for record in good if record.num_tokens > 1],
        "e2e": [e2e(record) for record in good],
        "normalized": [normalized(record) for record in good],
        "lateness": [record.sent - record.scheduled for record in due],
    }
    latencies = {name: Latency.of(found) for name, found in values.items()}
    attained = sum(slo.met_by(record) for record in due)
    busy = outcome.cpu / outcome.wall if outcome.wall else 0.0
    return Summary(
        begin=warmup,
        requests=len(due),
        failures=dict(Counter(record.error for record in due if record.error)),
        offered=completion_rate([record.scheduled for record in due]),
        throughput=throughput,
        tokens_per_second=throughput * float(np.mean([record.num_tokens for record in good] or [0])),
        prompt_tokens_per_second=throughput * float(np.mean([record.prompt_tokens for record in good] or [0])),
        goodput=throughput * attained / max(1, len(good)),
        attainment=attained / len(due),
        meets_slo=_meets(due, slo),
        latencies=latencies,
        generator_busy=busy,
        warnings=_warnings(latencies, busy),
    )


def completion_rate(times: Sequence[float]) -> float:
    """Completions per second of answers that ended at `times` (see above); 0 for fewer than two, or all at once."""
    ordered = np.sort(times)
    half = len(ordered) // 2
    if not half:
        return 0.0
    between = float(np.mean(ordered[-half:]) - np.mean(ordered[:half]))
    # An odd one in the middle belongs to neither half, but to the time between their means.
    return (len(ordered) - half) / between if between > 0 else 0.0


def _meets(records: list[Record], slo: Slo) -> bool:
    """Each percentile on its own, as MLPerf has it. A failed request took for ever, which no limit allows."""
    return all(
        min(limit, sys.float_info.max)
        >= _nearest_rank([math.inf if record.error else of(record) for record in records], slo.percentile)
        for of, limit in ((ttft, slo.ttft), (tpot, slo.tpot))
    )


def _nearest_rank(values: list[float], percentile: float) -> float:
    """The least value that `percentile` percent do not exceed (no interpolation: values may be infinite)."""
    return sorted(values)[max(0, math.ceil(percentile / 100 * len(values)) - 1)]


def _warnings(latencies: dict[str, Latency], busy: float) -> list[str]:
    """What makes these numbers say more about the generator than about the server."""
    found = []
    if busy > BUSY_SHARE:
        found.append(
            f"the load generator was busy {busy:.0%} of the time: it is the bottleneck, so use several "
            "(locust --processes), or a machine of their own"
        )
    late, first = latencies["lateness"].percentiles[99], latencies["ttft"].median
    if late > LATE_SHARE * first:
        found.append(
            f"requests were sent late (p99 {1e3 * late:.0f} ms, median TTFT {1e3 * first:.0f} ms): "
            "the load generator did not get the processor in time"
        )
    return found
