"""Sweeps: one server after the other under a growing load, for the paper's Figures 10 and 11."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.measurement import Measurement, Target, measure, serving
from loadtest.summary import Summary, completion_rate
from loadtest.workload import Arrivals, Workload

BLOCK = 16  # of the K/V pool: compiled kernels want multiples of it
WARMUP_SHARE = 0.2  # of every load; in it, batches and queues have their first shape


@dataclass(frozen=True)
class Series:
    """A system under test: our engine with a policy and a `max_bs`. `swept` False: only its saturated rate is taken."""

    policy: str
    max_bs: int
    swept: bool = True

    @property
    def name(self) -> str:
        """As in the paper: orca(8)."""
        return f"{self.policy}({self.max_bs})"

    def settings(self, longest: int) -> dict[str, Any]:
        """Of engine.yaml, for requests of at most `longest` tokens: the K/V pool never holds a request back."""
        longest = -(-longest // BLOCK) * BLOCK
        return {
            "scheduler.policy": self.policy,
            "scheduler.max_bs": self.max_bs,
            "limits.max_model_len": longest,
            "kv_cache.n_slots": longest * self.max_bs,
            "kv_cache.block_size": BLOCK,
        }


@dataclass(frozen=True)
class Plan:
    """How much of a sweep: `fractions` of the saturated rate, each for `seconds`, with every seed.

    `longest` is the most tokens of a request, after `scale`. `shown` is the series whose requests are shown one by one.
    """

    workload: str
    longest: int
    series: Sequence[Series]
    shown: Series
    fractions: Sequence[float]
    seconds: float
    saturated_seconds: float
    seeds: Sequence[int] = (0,)
    scale: float = 1.0

    @property
    def sizes(self) -> list[int]:
        """Batch sizes at which Orca and both baselines are measured."""
        sizes = [
            {series.max_bs for series in self.series if series.policy == policy}
            for policy in ("orca", "static_fair", "static_ft")
        ]
        return sorted(set.intersection(*sizes) - {1})


@dataclass(frozen=True)
class Saturated:
    """A server that always has requests waiting: its rate, and what the engine did meanwhile."""

    rate: float
    requests: int
    iterations_per_request: float
    ms_per_iteration: float


@dataclass(frozen=True)
class Point:
    """One load of one series; `rate` was offered."""

    series: str
    seed: int
    rate: float
    summary: Summary


@dataclass
class Sweep:
    """All of it. `own` is the engine's own time, in seconds a token, with the batches of `plan.shown`."""

    plan: Plan
    saturated: dict[str, list[Saturated]] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    own: float = math.nan
    example: Measurement | None = None

    def rate(self, series: str) -> float:
        """The saturated rate: the median over seeds."""
        rates = sorted(run.rate for run in self.saturated[series])
        return rates[len(rates) // 2]

    def curve(self, series: str, value: Callable[[Summary], float]) -> list[tuple[float, float]]:
        """Points (throughput, `value`) in the order of the offered rate, medians over seeds."""
        by_rate: dict[float, list[Summary]] = {}
        for point in self.points:
            if point.series == series:
                by_rate.setdefault(point.rate, []).append(point.summary)
        return [
            (_median([summary.throughput for summary in runs]), _median([value(summary) for summary in runs]))
            for _, runs in sorted(by_rate.items())
        ]


def run(plan: Plan, model: Path, console: Console, settings: Mapping[str, Any]) -> Sweep:
    """Measure every series of `plan`, with the same `settings` of engine.yaml. Raises ServerError, GeneratorError."""
    sweep = Sweep(plan)
    workload = Workload(plan.workload, model, scale=plan.scale)
    for series in plan.series:
        overrides = {**settings, "model": str(model.resolve()), **series.settings(plan.longest)}
        with serving(overrides, console, name="experiment") as target:
            _warm_up(target, workload)
            for seed in plan.seeds:
                saturated = saturate(target, workload, series, plan.saturated_seconds, seed)
                sweep.saturated.setdefault(series.name, []).append(saturated)
            console.print(f"{series.name}: {sweep.rate(series.name):.3g} requests/s saturated", highlight=False)
            if series == plan.shown:
                sweep.own = own_time(target, model, series.max_bs, plan.scale)
            for fraction in plan.fractions if series.swept else ():
                rate = fraction * sweep.rate(series.name)
                for seed in plan.seeds:
                    measured = _load(target, workload, rate, plan.seconds, seed)
                    sweep.points.append(Point(series.name, seed, rate, measured.summary))
                    normalized = 1e3 * measured.summary.latency("normalized").median
                    console.print(
                        f"{series.name}: {rate:.3g} requests/s offered, {measured.summary.throughput:.3g} answered,"
                        f" {normalized:.3g} ms a token (median)",
                        highlight=False,
                    )
                    if series == plan.shown and fraction < 1:
                        sweep.example = measured
    return sweep


def saturate(target: Target, workload: Workload, series: Series, seconds: float, seed: int) -> Saturated:
    """Keep twice as many requests in the server as it can run, for `seconds`."""
    streams = 2 * series.max_bs
    sessions = workload.sessions(max(64, 4 * streams), Arrivals(kind="closed"), seed)
    measured = measure(target, sessions, streams=streams, until=seconds)
    begin = WARMUP_SHARE * seconds
    every = [record.ended for record in measured.outcome.records if not record.error]
    ends = [end for end in every if begin <= end <= seconds]
    rate = completion_rate(ends) or completion_rate(every)  # a slow server may have answered next to nothing by then
    if not rate:
        raise ValueError(f"{series.name}: {len(every)} answers in {seconds:g} s say nothing of a rate: measure longer")
    times = [moment.time - measured.outcome.started for moment in measured.moments]
    full = [m for m, time in zip(measured.moments, times, strict=True) if begin <= time <= seconds]
    iterations = full[-1].iterations - full[0].iterations if full else 0.0
    per_iteration = (full[-1].time - full[0].time) / iterations if iterations else math.nan
    return Saturated(rate, len(ends), 1 / (rate * per_iteration), 1e3 * per_iteration)


def own_time(target: Target, model: Path, batch: int, scale: float) -> float:
    """Seconds a token of one full batch and nothing else: prompts of 128 tokens, 32 generated (Figure 9's)."""
    workload = Workload("homogeneous:128,32", model, scale=scale)
    sessions = workload.sessions(batch, Arrivals(kind="closed"))
    outcome = measure(target, sessions, streams=batch).outcome
    return outcome.wall / max(record.max_tokens for record in outcome.records)


def at_latency(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The throughput at which a curve reaches `level`: linear in the logarithm of the latency between two points.

    The highest throughput if it stays below, None if it begins above.
    """
    if not curve or curve[0][1] > level:
        return None
    for (x, low), (next_x, high) in pairwise(curve):
        if high > level:
            share = (math.log(level) - math.log(low)) / (math.log(high) - math.log(low))
            return x + share * (next_x - x)
    return max(x for x, _ in curve)


def _load(target: Target, workload: Workload, rate: float, seconds: float, seed: int) -> Measurement:
    count = max(8, math.ceil(rate * seconds) + 1)
    sessions = workload.sessions(count, Arrivals(rate=rate), seed)
    return measure(target, sessions, warmup=WARMUP_SHARE * (sessions[-1].at or 0.0))


def _warm_up(target: Target, workload: Workload) -> None:
    measure(target, workload.sessions(4, Arrivals(kind="closed"), seed=99), streams=4)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
