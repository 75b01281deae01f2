"""The same load again and again for a long time: whether anything fails, grows or drifts.

Every pass offers exactly the same requests at the same times, so that passes can be compared with one another even
where arrivals are as uneven as in a real trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.load import Session
from loadtest.measurement import Measurement, Target, measure
from loadtest.report import Row, rates_row

LATENCIES = ("ttft", "itl", "e2e")


@dataclass(frozen=True)
class Limits:
    """What is still steady: relative growth of resident memory, and of p99 latencies, from one pass to the last."""

    memory: float = 0.02
    p99: float = 0.2


@dataclass(frozen=True)
class Pass:
    """One pass; `memory` is the most bytes that all processes of the server had resident, 0 if that is not known."""

    measurement: Measurement
    memory: int


def run(target: Target, sessions: list[Session], passes: int, say: Callable[[str], None]) -> list[Pass]:
    """Send the sessions `passes` times."""
    done = []
    for number in range(passes):
        measurement = measure(target, sessions)
        memory = max((moment.memory for moment in measurement.moments), default=0)
        done.append(Pass(measurement, memory))
        say(", ".join(f"{name} {value}" for name, value in row(number + 1, done[-1]).items()))
    return done


def row(number: int, done: Pass) -> Row:
    """A pass in numbers."""
    return {
        "pass": number,
        **rates_row(done.measurement.summary),
        **{f"{name} p99 (s)": f"{_p99(done, name):.3g}" for name in LATENCIES},
        "memory (GB)": f"{done.memory / 1e9:.3f}",
    }


def verdicts(passes: list[Pass], limits: Limits) -> list[tuple[str, str, bool]]:
    """What was asked, what was found, and whether it is as it should be.

    The first pass also fills caches, so memory is compared from the second on, if there are three or more. Of a server
    that was not started here memory is not known, and nothing is said of it.
    """
    failed = sum(sum(done.measurement.summary.failures.values()) for done in passes)
    found = [("no failures", f"{failed} failed", failed == 0)]
    first, last = passes[1 if len(passes) > 2 else 0], passes[-1]
    if first.memory:
        growth = last.memory / first.memory - 1
        found.append((f"memory grows by at most {limits.memory:.0%}", f"{growth:+.1%}", growth <= limits.memory))
    for name in LATENCIES:
        drift = _p99(last, name) / _p99(first, name) - 1
        found.append((f"p99 of {name} grows by at most {limits.p99:.0%}", f"{drift:+.1%}", drift <= limits.p99))
    return found


def _p99(done: Pass, name: str) -> float:
    return done.measurement.summary.latency(name).percentiles[99]
