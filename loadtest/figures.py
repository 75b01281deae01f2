"""Figures 3, 10 and 11 of the Orca paper, measured: plans, and the reports made of what came out."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from loadtest import paper, plots
from loadtest.experiment import Plan, Series, Sweep, at_latency, run
from loadtest.load import Session, Turn
from loadtest.measurement import measure, serving
from loadtest.report import Report, Row, milliseconds, rates_row, spread, write_csv
from loadtest.summary import Summary
from loadtest.texts import texts_of
from loadtest.workload import PAPER

SIZES = (8, 16, 32)  # of batches that the schedules are compared at
SCALE = 0.25  # of all lengths in the scaled variants: schedules keep their ratios, and it ends within minutes
# Figure 3: the unit of generated tokens, so that a bar can be seen.
FIGURE3_TOKENS = 16

_FIGURE10_SERIES = [
    *(Series("orca", size) for size in (1, *SIZES)),
    Series("static_ft", 1),
    Series("static_ft", 8),
    Series("static_fair", 8),
    Series("static_fair", 16, swept=False),
    Series("static_fair", 32, swept=False),
    Series("static_ft", 16, swept=False),
    Series("static_ft", 32, swept=False),
]
_FIGURE11_SERIES = [*(Series("orca", size) for size in (1, 8, 32)), *(Series("static_fair", size) for size in (1, 8))]

_FRACTIONS = {"scaled": (0.3, 0.6, 0.9, 1.2), "full": (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2)}  # of the saturated rate
_SEEDS = {"scaled": (0,), "full": (0, 1, 2)}
LARGEST = Series("orca", SIZES[-1])


def _plan(variant: str, workload: str, longest: int, series: list[Series], seconds: float, scale: float = 1.0) -> Plan:
    return Plan(workload, longest, series, LARGEST, _FRACTIONS[variant], seconds, 1.3 * seconds, _SEEDS[variant], scale)


FIGURE10 = {
    "scaled": _plan("scaled", "paper", 160, _FIGURE10_SERIES, 12.0, SCALE),
    "full": _plan("full", "paper", 640, _FIGURE10_SERIES, 90.0),
}
FIGURE11 = {
    "scaled": [
        _plan("scaled", "homogeneous:32,32", 64, _FIGURE11_SERIES, 8.0),
        _plan("scaled", "homogeneous:64,64", 128, _FIGURE11_SERIES, 12.0),
    ],
    "full": [
        _plan("full", "homogeneous:32,32", 64, _FIGURE11_SERIES, 90.0),
        _plan("full", "homogeneous:256,256", 512, _FIGURE11_SERIES, 90.0),
    ],
}


def figure10(plan: Plan, model: Path, output: Path, console: Console, settings: Mapping[str, Any]) -> Path:
    """Median normalized latency against throughput; the report's path."""
    sweep = run(plan, model, console, settings)
    report = Report(
        output,
        "Figure 10: normalized latency against throughput",
        "Iteration-level scheduling against two request-level baselines on the same engine, kernels and weights. "
        "static_fair computes whole prompts in the first iteration; static_ft takes there as much of every prompt as "
        "the shortest one has, as the paper ran FasterTransformer. Latency is the median over requests of (end to end "
        "/ generated tokens), from when a request was due.",
        _facts([plan], model, settings),
    )
    _add_curves(report, sweep, "normalized", "median normalized latency (ms/token)", beside_paper=True)
    _add_saturated(report, sweep)
    _add_equal_latency(report, sweep, plan.shown.name)
    _add_points(report, sweep)
    return report.write()


def figure11(plans: list[Plan], model: Path, output: Path, console: Console, settings: Mapping[str, Any]) -> Path:
    """Homogeneous requests: median end-to-end latency, not normalized, against throughput."""
    report = Report(
        output,
        "Figure 11: homogeneous requests",
        "All requests have the same lengths, so request-level batches waste nothing but the time until a batch begins, "
        "and gain from their size. Latency is the median from when a request was due to its last token.",
        _facts(plans, model, settings),
    )
    for plan in plans:
        sweep = run(plan, model, console, settings)
        name = plan.workload.replace(":", "-").replace(",", "-")
        _add_curves(report, sweep, "e2e", "median latency (ms)", name=name, title=plan.workload)
        rows = [{"series": series, "saturated (requests/s)": f"{sweep.rate(series):.3g}"} for series in sweep.saturated]
        report.add(rows=rows)
        _add_points(report, sweep, name)
    return report.write()


def figure3(model: Path, output: Path, console: Console, settings: Mapping[str, Any]) -> Path:
    """Early-finished and late-joining requests: the same four requests under both schedules."""
    report = Report(
        output,
        "Figure 3: early-finished and late-joining requests",
        "Two requests run at a time; x0 is there first, the others come while it runs. With iteration-level scheduling "
        "x1 leaves when it has ended, x2 takes its place at once, and x3 that of x0. A request-level batch answers x1 "
        "only when x2, its companion there, has ended too, and lets x3 in only then.",
        {"model": model.name, "settings": _settings(settings)},
    )
    rows: list[Row] = []
    measured = {}
    for series in (Series("static_fair", 2), Series("orca", 2)):
        overrides = {**settings, "model": str(model.resolve()), **series.settings(256)}
        with serving(overrides, console, name="experiment") as target:
            sessions = _figure3_sessions(model)
            alone = measure(target, sessions[:1]).outcome.wall  # how fast this machine is
            # All come while x0 runs, far enough apart to come in order.
            timed = [msgspec.structs.replace(session, at=i * alone / 6) for i, session in enumerate(sessions)]
            measured[series.name] = measure(target, timed)
    with plots.style():
        figure, panels = plots.new_figure(2, width=9.0, height=2.8)
        panels[1].sharex(panels[0])
        for (name, measurement), panel in zip(measured.items(), panels, strict=True):
            records = sorted(measurement.outcome.records, key=lambda record: record.session)
            plots.waterfall(panel, records, labels=[f"x{i}" for i in range(4)], title=name)
            longest = max(record.max_tokens for record in records[1:3])  # of the batch of x1 and x2
            for record in records:
                in_batch = name.startswith("static") and record.session in (1, 2)
                rows.append(
                    {
                        "schedule": name,
                        "request": f"x{record.session}",
                        "generated": record.num_tokens,
                        "iterations in the batch": longest if in_batch else record.max_tokens,
                        "of them wasted": longest - record.max_tokens if in_batch else 0,
                        "came (s)": f"{record.scheduled:.3f}",
                        "first token (s)": f"{record.times[0]:.3f}",
                        "ended (s)": f"{record.ended:.3f}",
                    }
                )
        report.add_figure("figure3", figure, "The requests, one bar each")
    write_csv(output / "figure3.csv", rows)
    report.add("In numbers", rows=rows)
    return report.write()


def _figure3_sessions(model: Path) -> list[Session]:
    """x0 to x3, each of them one request."""
    texts, rng = texts_of(model), random.Random(0)
    return [Session([Turn(texts.draw(8, rng), 8, units * FIGURE3_TOKENS)]) for units in (4, 2, 3, 1)]


def _facts(plans: Sequence[Plan], model: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    def workload(plan: Plan) -> str:
        return plan.workload + (f", all lengths times {plan.scale:g}" if plan.scale != 1 else "")

    return {
        "model": model.name,
        "workload": f"{'; '.join(map(workload, plans))}; Poisson arrivals; answers end only with their length",
        "each point": "; ".join(f"{plan.seconds:g} s, {len(plan.seeds)} seed(s)" for plan in plans),
        "settings": _settings(settings),
    }


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as in engine.yaml"


def _add_curves(
    report: Report,
    sweep: Sweep,
    latency: str,
    unit: str,
    *,
    name: str = "curves",
    title: str = "measured here",
    beside_paper: bool = False,
) -> None:
    def value(summary: Summary) -> float:
        return 1e3 * summary.latency(latency).median

    curves = {s.name: sweep.curve(s.name, value) for s in sweep.plan.series if s.swept}
    with plots.style():
        figure, panels = plots.new_figure(1 + beside_paper, width=9.0 if beside_paper else 7.5)
        plots.throughput_latency(panels[0], curves, unit=unit, title=title)
        if beside_paper:
            title = "the paper: 175B on 16 A100 (digitised)"
            plots.throughput_latency(panels[1], paper.figure10("175B"), unit=unit, title=title)
        report.add_figure(name, figure, "Throughput and latency")


def _add_saturated(report: Report, sweep: Sweep) -> None:
    """How much of the ratio is the schedule (iterations a request) and how much is what an iteration costs."""
    rows = []
    for series in sweep.plan.series:
        runs = sweep.saturated[series.name]
        rows.append(
            {
                "series": series.name,
                "saturated (requests/s)": spread([run.rate for run in runs]),
                "iterations per request": spread([run.iterations_per_request for run in runs]),
                "ms per iteration": spread([run.ms_per_iteration for run in runs]),
                "requests counted": sum(run.requests for run in runs),
            }
        )
    ratios = []
    for size in sweep.plan.sizes:
        expected = paper.iterations(PAPER, size)
        for baseline, iterations in (("static_fair", expected.static_fair), ("static_ft", expected.static_ft)):
            ours, theirs = (sweep.saturated[f"{policy}({size})"] for policy in ("orca", baseline))
            pairs = list(zip(ours, theirs, strict=True))
            ratios.append(
                {
                    "ratio": f"orca({size}) / {baseline}({size})",
                    "throughput": spread([a.rate / b.rate for a, b in pairs]),
                    "by the schedule": spread([b.iterations_per_request / a.iterations_per_request for a, b in pairs]),
                    "by the cost of an iteration": spread([b.ms_per_iteration / a.ms_per_iteration for a, b in pairs]),
                    "schedule alone, in theory": f"{iterations / expected.orca:.2f}",
                }
            )
    write_csv(report.directory / "saturated.csv", rows)
    report.add("Saturated: twice as many requests as can run, at all times", rows=rows)
    report.add(
        "What the ratios are made of",
        "Throughput is 1 / (iterations per request x time per iteration), so a ratio is the product of the two next to "
        "it. The theory is that of constant cost per iteration; the column on its left is how far this engine is from "
        "that: an iteration of a static batch carries rows that have ended, but few prompts, while one of Orca's is "
        "full of rows at work, and often has a prompt in it.",
        rows=ratios,
    )
    write_csv(report.directory / "ratios.csv", ratios)


def _add_equal_latency(report: Report, sweep: Sweep, largest: str) -> None:
    """Where a horizontal line cuts the curves; and what the ratio there is made of (the paper's 36.9x)."""
    own = 1e3 * sweep.own
    level = 2 * own
    curves = {
        s.name: sweep.curve(s.name, lambda summary: 1e3 * summary.latency("normalized").median)
        for s in sweep.plan.series
        if s.swept
    }
    reached = {name: at_latency(curve, level) for name, curve in curves.items()}
    ours = reached[largest]
    rows: list[Row] = [
        {
            "series": name,
            f"throughput at {level:.3g} ms/token (requests/s)": f"{rate:.3g}" if rate else "above at any rate measured",
            f"{largest} / this": f"{ours / rate:.2f}" if ours and rate else "",
        }
        for name, rate in reached.items()
    ]
    report.add(
        "At equal latency",
        "The level is twice the engine's own time, as in the paper (190 ms there): one batch of "
        f"{sweep.plan.shown.max_bs} equal requests and nothing else took {own:.3g} ms a token.",
        rows=rows,
    )
    size = sweep.plan.sizes[0]
    small, big = f"orca({size})", largest
    ft, fair = f"static_ft({size})", f"static_fair({size})"
    chain = [
        ("scheduling", f"{small} / {fair}, saturated", sweep.rate(small) / sweep.rate(fair)),
        ("the baseline's shortest-prompt rule", f"{fair} / {ft}, saturated", sweep.rate(fair) / sweep.rate(ft)),
        ("batching", f"{big} / {small}, saturated", sweep.rate(big) / sweep.rate(small)),
        ("engine", "the same in all series", 1.0),
    ]
    if ours and (theirs := reached[ft]):
        chain.append(
            (
                "reading at a latency, not at the ceiling",
                "what is left",
                ours / theirs / math.prod(factor for *_, factor in chain),
            )
        )
        chain.append(("all together", f"{big} / {ft} at {level:.3g} ms/token", ours / theirs))
    report.add(
        f"{big} against {ft}, factor by factor",
        "The paper's 36.9x is of this kind: about 1.8 scheduling, 3.9 the shortest-prompt rule, 2.2 batching, 2 "
        "pipeline stages that FasterTransformer left idle (and up to 1.5 the engine), 1.2 reading at a latency.",
        rows=[{"factor": name, "taken from": source, "times": f"{factor:.2f}"} for name, source, factor in chain],
    )


def _add_points(report: Report, sweep: Sweep, name: str = "points") -> None:
    rows = [
        {
            "series": point.series,
            "seed": point.seed,
            "rate": f"{point.rate:.4g}",
            **rates_row(point.summary),
            **{
                f"{latency} {which} (ms)": milliseconds(value)
                for latency in ("normalized", "e2e", "ttft", "itl")
                for which, value in (
                    ("p50", point.summary.latency(latency).median),
                    ("p99", point.summary.latency(latency).percentiles[99]),
                )
            },
        }
        for point in sweep.points
    ]
    write_csv(report.directory / f"{name}.csv", rows)
    for point in sweep.points:
        report.warn(*(f"{point.series} at {point.rate:.3g} requests/s: {text}" for text in point.summary.warnings))
    report.add("Every point", rows=rows)
    if sweep.example:
        report.add_measurement(f"{name}-example", sweep.example)
