"""When requests arrive in an open loop: seconds after the start, the first at once. The same seed, the same times."""

from __future__ import annotations

import random
from collections.abc import Sequence


def poisson(count: int, rate: float, seed: int = 0) -> list[float]:
    """A Poisson process of `rate` a second: independent, exponentially distributed gaps."""
    return gamma(count, rate, 1.0, seed)


def gamma(count: int, rate: float, variation: float, seed: int = 0) -> list[float]:
    """Gamma-distributed gaps whose standard deviation is `variation` times their mean, 1 / `rate`.

    1 is a Poisson process; larger is burstier, smaller is more regular. Raises ValueError if either is not positive.
    """
    if not (rate > 0 and variation > 0):
        raise ValueError(f"rate and variation must be above 0, got {rate} and {variation}")
    rng = random.Random(seed)
    shape = variation**-2
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.gammavariate(shape, 1 / (rate * shape)))
    return times[:count]


def replay(times: Sequence[float], rate: float | None) -> list[float]:
    """Recorded `times`, in order, shifted to begin at 0 and stretched or compressed to `rate` a second on average.

    None is the recorded rate. Raises ValueError if they do not span any time.
    """
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    if span <= 0 or (rate is not None and rate <= 0):
        speed = "as recorded" if rate is None else f"at {rate:g} a second"
        raise ValueError(f"{len(times)} recorded arrivals over {span:g} s cannot be replayed {speed}")
    scale = 1.0 if rate is None else (len(times) - 1) / rate / span
    return [(time - times[0]) * scale for time in times]
