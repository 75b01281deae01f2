"""Numbers of a comparison as JSON, as a table, and as a plot."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.peers.environments import ROOT, Environment, run
from bench.peers.metrics import HEADLINES
from loadtest.machine import machine

if TYPE_CHECKING:
    from bench.peers.compare import Comparison

PLOT = Environment("plot")


def _spread(values: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": [round(value, 3) for value in values],
    }


def summary(comparison: Comparison) -> dict[str, Any]:
    """Per task and system every metric's median and spread, and of ours against each other system the ratio.

    A ratio is taken within a round, where both ran on the machine as it was then; the median over rounds is reported.
    Ours are those with the same weights as the other system (int8 against int8).
    """
    tasks: dict[str, Any] = {}
    for task, systems in comparison.runs.items():
        headlines = HEADLINES[task.split("-")[0]]
        tasks[task] = {"headlines": headlines, "systems": {}}
        for name, runs in systems.items():
            entry: dict[str, Any] = {metric: _spread([run[metric] for run in runs]) for metric in runs[0]}
            for ours in _counterparts(name, systems, comparison):
                pairs = list(zip(systems[ours], runs, strict=False))  # one that failed on the way has fewer rounds
                entry[f"{ours} / this"] = {
                    headline: _spread([mine[headline] / theirs[headline] for mine, theirs in pairs])
                    for headline in headlines
                }
            if comparison.matrix and task == "prefill":
                pairs = list(zip(runs, comparison.matrix, strict=False))
                entry["of the matrix rate"] = _spread([mine["tokens/s"] / rate["tokens/s"] for mine, rate in pairs])
            tasks[task]["systems"][name] = entry
    matrix = {name: _spread([rate[name] for rate in comparison.matrix]) for name in (comparison.matrix or [{}])[0]}
    return {
        "tasks": tasks,
        "matrix rate (bf16, 512 rows)": matrix,
        "greedy agreement with the first": comparison.agreement,
        "systems": comparison.systems,
    }


def _counterparts(name: str, measured: Iterable[str], comparison: Comparison) -> list[str]:
    if name.startswith("ours"):
        return []
    weights = {system: comparison.systems[system]["options"]["weights"] for system in measured}
    return [system for system in weights if system.startswith("ours") and weights[system] == weights[name]]


def write(arguments: argparse.Namespace, comparison: Comparison) -> None:
    """Everything as JSON."""
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
    }
    text = json.dumps(facts | summary(comparison), indent=2) + "\n"
    arguments.output.write_text(text.replace(f"{ROOT}/", ""))  # whose machine it was is nobody's business


def show(result: dict[str, Any], console: Console) -> None:
    """One table per question: the tasks, and the systems."""
    table = Table(title="medians (min to max over rounds), all on the same machine and requests")
    measured = {name: None for entry in result["tasks"].values() for name in entry["systems"]}
    ratios = [f"{name} / this" for name in measured if name.startswith("ours")]
    for column in ("task", "", "system", "result", *ratios, "of the matrix rate"):
        table.add_column(column, justify="left" if column in ("task", "", "system") else "right")
    for task, entry in result["tasks"].items():
        for headline in entry["headlines"]:
            for name, metrics in entry["systems"].items():
                cells = [_cell(metrics.get(ratio, {}).get(headline)) for ratio in ratios]
                cells += [_cell(metrics.get("of the matrix rate"))]
                table.add_row(task, headline, name, _cell(metrics[headline]), *cells)
            table.add_section()
    console.print(table)
    systems = Table(title="systems")
    for column in ("system", "version", "peak memory GB", "load s", "same answers as the first", "state"):
        systems.add_column(column)
    for name, facts in result["systems"].items():
        same = result["greedy agreement with the first"].get(name)
        shown = f"{same['equal']} of {same['of']}, prefix {same['mean equal prefix']:.0%}" if same else ""
        version = str(facts.get("info", {}).get("version", ""))
        numbers = [f"{facts[key]:.2f}" if key in facts else "" for key in ("peak memory GB", "seconds")]
        systems.add_row(name, version, *numbers, shown, facts.get("failed", "measured"))
    console.print(systems)
    if rate := result["matrix rate (bf16, 512 rows)"]:
        tflops, tokens = _cell(rate["tflops"]), _cell(rate["tokens/s"])
        console.print(f"bf16 matrix products at 512 rows: {tflops} TFLOP/s, {tokens} tokens/s")


def _cell(values: dict[str, Any] | None) -> str:
    return f"{values['median']:.4g} ({values['min']:.4g} to {values['max']:.4g})" if values else ""


def plot(results: Path) -> None:
    """Draw `results` beside it as PNG. Raises InstallError."""
    PLOT.install()
    script = Path(__file__).with_name("plot.py")
    run([str(PLOT.python), str(script), str(results), str(results.with_suffix(".png"))], "plot")
