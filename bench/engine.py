"""The engine by itself: rates, where the time goes, and how near to the limits of the machine: `make bench-engine`.

Every kind of weights runs, in every round, decode and prefill in this process (a forward pass and greedy sampling per
iteration, no scheduler) and the workload in a real engine process that is frozen in between. The limits, streaming
reads and bf16 matrix products, are measured in the same round; those of bf16 also stand for products of 8 bits, which
may therefore pass them. The first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.driver import Driver, Run
from bench.limits import measure_limits
from bench.model import open_model
from bench.peers.environments import ROOT
from bench.peers.metrics import HEADLINES, check, measure
from bench.peers.system_process import SystemProcess
from bench.peers.systems import SYSTEMS
from bench.peers.workload import Sizes, Task, make_tasks
from bench.summary import cell, spread
from bench.work import Work, row_work
from loadtest.machine import machine
from orca_backend.models.spec import ModelSpec
from orca_kernels import cpu

OUTSIDE = "outside the program"  # building the batch, sampling, Python
FLOORS = ("memory", "matrix")


def workload_work(spec: ModelSpec, task: Task) -> Work:
    """The operations of a workload, however it is batched; what it reads depends on that and is left out."""
    total = Work()
    for request in task.requests:
        prompt, output = len(request.prompt_ids), request.max_new_tokens
        # The last token is sampled and never run.
        total += row_work(spec, 0, prompt + output - 1, sampled=output, kv_bytes_per_token=0)
    return total


class Variant:
    """One kind of weights: a model in this process and an engine process."""

    def __init__(self, name: str, arguments: argparse.Namespace, spec: ModelSpec, stack: contextlib.ExitStack) -> None:
        """Load both. `name` is "bf16" or a quantization."""
        sizes = arguments.sizes
        weights = "none" if name == "bf16" else name
        slots = max(
            max(sizes.decode_batches) * (sizes.decode_prompt + sizes.decode_output + 16),
            sizes.prefill_requests * (sizes.prefill_prompt + 17),
        )
        model = open_model(
            model=str(arguments.model),
            dtype="bfloat16",
            kernels="compiled",
            quantization=weights,
            threads=arguments.threads,
            kv_cache={"n_slots": slots},
        )
        self.weight_bytes = model.info.weight_bytes
        self._driver = Driver(model, spec)
        self._spec = spec
        system = dataclasses.replace(SYSTEMS["ours"], options={})
        self._process = stack.enter_context(SystemProcess(f"engine-{name}", system, arguments.threads))
        options = {"threads": arguments.threads, "dtype": "bf16", "weights": weights}
        options |= {"max_running": sizes.max_running, "max_tokens": sizes.max_tokens}
        self.info = self._process.load(arguments.model, options)["info"]

    def run(self, task: Task) -> tuple[Run, float]:
        """One task once, and its rate by the headline of its kind. Raises SystemFailed or WrongOutputError."""
        if task.kind == "workload":
            outcome = self._process.run(task.requests)
            check(task, outcome)
            return Run(seconds=outcome.wall, work=workload_work(self._spec, task)), measure(task, outcome)["requests/s"]
        run = self._driver.decode(task.requests) if task.kind == "decode" else self._driver.prefill(task.requests)
        run.operations[OUTSIDE] = run.seconds - sum(run.operations.values())
        return run, run.tokens / run.seconds


def summarize(task: Task, runs: list[tuple[Run, float]], limits: list[dict[str, float]]) -> dict[str, Any]:
    """One task of one variant over all rounds; `limits` of the same rounds. Floors are shares: 1 is the limit."""
    entry: dict[str, Any] = {HEADLINES[task.kind][0]: spread([rate for _, rate in runs])}
    for floor in FLOORS:
        shares = [run.work.seconds(limit)[floor] / run.seconds for (run, _), limit in zip(runs, limits, strict=True)]
        if all(shares):
            entry[f"of the {floor} floor"] = spread(shares)
    first = runs[0][0]
    if first.operations:
        entry["ms per iteration"] = spread([1e3 * run.seconds / run.iterations for run, _ in runs])
        entry["operations, ms per iteration"] = {
            name: float(f"{statistics.median(1e3 * run.operations[name] / run.iterations for run, _ in runs):.4g}")
            for name in first.operations
        }
    return entry


def show(result: dict[str, Any], console: Console) -> None:
    """The rates, and one table of times for each kind of weights."""
    table = Table(
        title="medians (least to greatest); the share of a floor is the least possible time over the measured"
    )
    for column in ("weights", "task", "rate", *(f"of the {floor} floor" for floor in FLOORS)):
        table.add_column(column, justify="left" if column in ("weights", "task") else "right")
    for name, variant in result["variants"].items():
        for task, entry in variant["tasks"].items():
            headline = HEADLINES[task.split("-")[0]][0]
            shares = (entry.get(f"of the {floor} floor") for floor in FLOORS)
            table.add_row(name, task, cell(entry[headline], headline), *(cell(s, "%") if s else "" for s in shares))
        table.add_section()
    console.print(table)
    limits = result["limits"]
    console.print(
        f"limits: reads {cell(limits['read GB/s'], 'GB/s')}, bf16 products {cell(limits['tflops'], 'TFLOP/s')}"
    )
    for name, variant in result["variants"].items():
        timed = {task: entry for task, entry in variant["tasks"].items() if "ms per iteration" in entry}
        times = Table(title=f"{name}: milliseconds per iteration (share)")
        times.add_column("operation")
        for task in timed:
            times.add_column(task, justify="right")
        for operation in next(iter(timed.values()))["operations, ms per iteration"]:
            row = []
            for entry in timed.values():
                value = entry["operations, ms per iteration"][operation]
                row.append(f"{value:.3f} ({value / entry['ms per iteration']['median']:.0%})")
            times.add_row(operation, *row)
        times.add_section()
        times.add_row("all", *(f"{entry['ms per iteration']['median']:.3f}" for entry in timed.values()))
        console.print(times)


def main() -> int:
    """Measure, write, show."""
    known = ["bf16", *(kind.value for kind in cpu.Quantization if kind is not cpu.Quantization.NONE)]
    parser = argparse.ArgumentParser(prog="bench.engine", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--weights", nargs="+", choices=known, default=["bf16", "int8"])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that warms up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="tiny tasks that only show that everything works")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "engine.json")
    arguments = parser.parse_args()
    arguments.sizes = Sizes.quick() if arguments.quick else Sizes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # frozen processes must be ended by us, on every way out
    console = Console(width=None if sys.stdout.isatty() else 120)
    spec = ModelSpec.read(arguments.model)
    tasks = make_tasks(["workload", "decode", "prefill"], arguments.sizes, spec.vocab_size)
    limits: list[dict[str, float]] = []
    runs: dict[tuple[str, str], list[tuple[Run, float]]] = {}
    with contextlib.ExitStack() as stack:
        with console.status("loading"):
            variants = {name: Variant(name, arguments, spec, stack) for name in arguments.weights}
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=(arguments.rounds + 1) * len(tasks) * len(variants))
            for number in range(arguments.rounds + 1):
                progress.update(bar, description="limits of the machine")
                limit = measure_limits(arguments.model, arguments.threads)
                if number:
                    limits.append(limit)
                for task in tasks:
                    for name, variant in variants.items():
                        progress.update(bar, description=f"round {number}: {task.name}, {name}")
                        measured = variant.run(task)
                        if number:
                            runs.setdefault((name, task.name), []).append(measured)
                        progress.advance(bar)
    result = {
        "date": date.today().isoformat(),
        "command": "make bench-engine",
        "machine": machine(),
        "model": arguments.model.name,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "limits": {name: spread([limit[name] for limit in limits]) for name in limits[0]},
        "variants": {
            name: {
                "kernels": variant.info["kernels"],
                "weight MB": round(variant.weight_bytes / 1e6, 1),
                "tasks": {task.name: summarize(task, runs[name, task.name], limits) for task in tasks},
            }
            for name, variant in variants.items()
        },
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    show(result, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
