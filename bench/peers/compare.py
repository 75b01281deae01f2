"""Ours and the peers on the same checkpoint and requests, one after the other in every round: `make bench-peers`.

Every system is loaded once and frozen while another is measured. The first round warms up and is not counted. What
cannot be installed, loaded or run is reported with its reason. Results are written after every round.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.peers import report
from bench.peers.environments import ROOT, InstallError
from bench.peers.metrics import Outcome, WrongOutputError, agreement, check, measure
from bench.peers.system_process import SystemFailed, SystemProcess
from bench.peers.systems import SYSTEMS
from bench.peers.workload import KINDS, Sizes, Task, make_online_task, make_tasks

DEFAULT = ("openvino", "llamacpp", "vllm", "ours", "ours-served")
_WARM_UP = 16  # requests of an online task


def _names(text: str) -> list[str]:
    return text.split(",")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.peers.compare", description=__doc__)
    parser.add_argument("--peers", type=_names, default=list(DEFAULT), help="in order of running")
    parser.add_argument("--tasks", type=_names, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--quick", action="store_true", help="tiny tasks that only show that everything works")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SYSTEM.OPTION=JSON", help="one more option of an adapter"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results" / "peers.json", help="the plot goes beside it"
    )
    arguments = parser.parse_args()
    for name, known in [(n, SYSTEMS) for n in arguments.peers] + [(k, KINDS) for k in arguments.tasks]:
        if name not in known:
            parser.error(f"unknown: {name!r}; known are {', '.join(known)}")
    return arguments


def override(options: dict[str, Any], system: str, settings: list[str]) -> dict[str, Any]:
    """`options` with the settings for this system, such as "openvino.scheduler.max_num_batched_tokens=512"."""
    options = copy.deepcopy(options)
    for setting in settings:
        path, _, value = setting.partition("=")
        name, *parents, leaf = path.split(".")
        if name == system:
            section: dict[str, Any] = options
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = json.loads(value)
    return options


class Comparison:
    """What was measured so far, and how to measure one round more."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        """Make the tasks."""
        self._arguments = arguments
        self._console = console
        self._config = json.loads((arguments.model / "config.json").read_text())
        self._sizes = Sizes.quick() if arguments.quick else Sizes()
        self._tasks = make_tasks(arguments.tasks, self._sizes, self._config["vocab_size"])
        if "online" in arguments.tasks:
            self._tasks.append(make_online_task(self._sizes, arguments.model))
        self.systems: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, list[dict[str, float]]]] = {task.name: {} for task in self._tasks}
        self.agreement: dict[str, dict[str, float]] = {}
        self.matrix: list[dict[str, float]] = []

    def start(self, stack: contextlib.ExitStack) -> dict[str, SystemProcess]:
        """Install, prepare and load every system that was asked for; those that can run."""
        arguments = self._arguments
        ready: dict[str, SystemProcess] = {}
        for name in arguments.peers:
            system = SYSTEMS[name]
            if not set(system.kinds).intersection(arguments.tasks):
                continue
            with self._console.status(f"{name}: installing and loading (the first time takes minutes)"):
                try:
                    if system.environment:
                        system.environment.install()
                    common: dict[str, Any] = {"threads": arguments.threads, "dtype": arguments.dtype, "weights": "none"}
                    common |= {"max_running": self._sizes.max_running, "max_tokens": self._sizes.max_tokens}
                    options = override(common | system.options, name, arguments.set)
                    model = system.prepare(arguments.model)
                    process = stack.enter_context(SystemProcess(name, system, arguments.threads))
                    loaded = process.load(model, options)
                except (InstallError, SystemFailed) as error:
                    self._fail(name, error)
                    continue
            self._console.print(f"{name}: loaded in {loaded['seconds']:.1f} s")
            self.systems[name] = {"options": options, **loaded}
            ready[name] = process
        return ready

    def round(self, processes: dict[str, SystemProcess], counted: bool, progress: Progress) -> None:
        """Every task on every system, system after system for each task."""
        bar = progress.add_task("", total=sum(t.kind in SYSTEMS[n].kinds for t in self._tasks for n in processes))
        if "prefill" in self._arguments.tasks:
            self._matrix_rate(counted)
        for task in self._tasks if counted else map(_to_warm_up, self._tasks):
            reference: Outcome | None = None
            for name, process in list(processes.items()):
                if task.kind not in SYSTEMS[name].kinds:
                    continue
                progress.update(bar, description=f"{task.name}: {name}")
                try:
                    outcome = process.run(task.requests)
                    check(task, outcome)
                    result = measure(task, outcome)
                except (SystemFailed, WrongOutputError) as error:
                    self._fail(name, error)
                    del processes[name]
                    continue
                finally:
                    progress.advance(bar)
                reference = reference or outcome
                if task.kind == "workload":
                    self.agreement[name] = agreement(outcome, reference)
                if counted:
                    self.runs[task.name].setdefault(name, []).append(result)
                self.systems[name]["peak memory GB"] = round(process.peak_memory() / 1e9, 2)
        progress.remove_task(bar)

    def _matrix_rate(self, counted: bool) -> None:
        arguments = self._arguments
        command = [
            sys.executable,
            str(Path(__file__).with_name("matrix_rate.py")),
            str(arguments.model),
            str(arguments.threads),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        if counted:
            self.matrix.append(json.loads(output))

    def _fail(self, name: str, error: Exception) -> None:
        self.systems.setdefault(name, {})["failed"] = str(error)
        self._console.print(f"{name}: {error}", style="red", markup=False)


def _to_warm_up(task: Task) -> Task:
    """As much of an online task as warms a system: it would take as long as it is, however fast the system is."""
    return dataclasses.replace(task, requests=task.requests[:_WARM_UP]) if task.kind == "online" else task


def main() -> int:
    """Compare; 0 if every system that was asked for could be measured."""
    arguments = parse_arguments()
    # Systems may be frozen: they must be ended by us, on every way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = Console(width=None if sys.stdout.isatty() else 160)
    comparison = Comparison(arguments, console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        processes = comparison.start(stack)
        with Progress(*columns, console=console, transient=True) as progress:
            rounds = progress.add_task("rounds", total=arguments.rounds + 1)
            for number in range(arguments.rounds + 1):
                comparison.round(processes, counted=number > 0, progress=progress)
                progress.advance(rounds)
                report.write(arguments, comparison)
    report.show(report.summary(comparison), console)
    if any(comparison.runs.values()):
        try:
            report.plot(arguments.output)
        except InstallError as error:
            console.print(f"no plot: {error}", style="red", markup=False)
    return int(any("failed" in system for system in comparison.systems.values()))


if __name__ == "__main__":
    sys.exit(main())
