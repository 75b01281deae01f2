"""What serving costs and what a client feels, through tritonserver and gRPC streams: `make bench-served`.

1. The workload over concurrent streams, against the engine process alone; the two take turns in every round, the first
   of which warms up. 2. Online: Poisson arrivals; latencies count from the moment at which a request was due, so that a
   generator or server that falls behind does not look better. 3. Memory of all processes with a small K/V pool, and
   the time from start to ready. The load generator is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.peers.environments import ROOT
from bench.peers.metrics import check
from bench.peers.system_process import SystemProcess
from bench.peers.systems import SYSTEMS
from bench.peers.workload import Request, Sizes, Task, make_turns
from bench.summary import cell, spread
from loadtest.arrivals import poisson
from loadtest.generator import generate
from loadtest.load import Load, Outcome, Session, Turn
from loadtest.machine import machine
from loadtest.summary import summarize
from orca_backend.server import TritonServer
from orca_backend.serving.tokenizer import Tokenizer

GOALS = {"served / engine alone": 0.9, "resident GB": 1.6, "seconds to ready": 15.0}
MODEL = "orca"
TIMEOUT_S = 900.0


def generate_load(url: str, turns: list[Turn], arrivals: Sequence[float | None], streams: int) -> Outcome:
    """Serve all requests through the server at `url`. Raises RuntimeError if one did not get all its tokens."""
    sessions = [Session([turn], at) for turn, at in zip(turns, arrivals, strict=True)]
    outcome = generate(Load(url=url, sessions=sessions, model=MODEL, streams=streams, timeout=TIMEOUT_S))
    for record in outcome.records:
        if record.error:
            got = f"{record.num_tokens} of {record.max_tokens} tokens"
            raise RuntimeError(f"request {record.session}: {got} {record.error}")
    return outcome


def latencies(outcome: Outcome) -> dict[str, float]:
    """Milliseconds, from the time at which each request was due; `gap` is between events, whatever they bring."""
    summary = summarize(outcome)
    names = {"first token": "ttft", "gap": "itl", "normalized latency": "normalized", "sent late": "lateness"}
    return {
        f"{name} p{percent} ms": 1e3 * summary.latency(key).percentiles[percent]
        for name, key in names.items()
        for percent in (50, 99)
    }


def family(server: TritonServer) -> dict[str, list[int]]:
    """Process ids by kind."""
    return {"tritonserver": [server.pid], "stub": server.stub_pids, "engine": server.engine_pids}


def memory(server: TritonServer) -> dict[str, Any]:
    """Gigabytes: resident (shared pages count in each process), proportional (they are divided), and the peak."""
    found: dict[str, Any] = {}
    for kind, pids in family(server).items():
        totals = {"resident GB": 0.0, "proportional GB": 0.0, "peak GB": 0.0}
        for pid in pids:
            info = psutil.Process(pid).memory_full_info()
            status = Path(f"/proc/{pid}/status").read_text()
            peak = re.search(r"VmHWM:\s+(\d+) kB", status)
            assert peak
            totals["resident GB"] += info.rss / 1e9
            totals["proportional GB"] += info.pss / 1e9
            totals["peak GB"] += (int(peak[1]) << 10) / 1e9
        found[kind] = totals
    found["all"] = {name: sum(of[name] for of in found.values()) for name in found["engine"]}
    return {kind: {name: round(value, 3) for name, value in of.items()} for kind, of in found.items()}


def cpu_seconds(server: TritonServer) -> dict[str, float]:
    """Processor time so far by kind of process."""
    times = {kind: [psutil.Process(pid).cpu_times() for pid in pids] for kind, pids in family(server).items()}
    return {kind: sum(time.user + time.system for time in of) for kind, of in times.items()}


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, slots: int, console: Console) -> Iterator[tuple[TritonServer, float]]:
    """A server of the model with a K/V pool of `slots` tokens, and the seconds from start to ready."""
    overrides = {
        "model": str(arguments.model.resolve()),
        "dtype": "bfloat16",
        "quantization": arguments.quantization,
        "threads": arguments.threads,
        "scheduler.max_bs": arguments.sizes.max_running,
        "kv_cache.n_slots": slots,
    }
    server = TritonServer(ROOT / "model_repository", models=[MODEL], overrides=overrides, console=console)
    started = time.perf_counter()
    with server:
        yield server, time.perf_counter() - started


class Comparison:
    """A server and an engine process alone, and what was measured of the two."""

    def __init__(self, arguments: argparse.Namespace, server: TritonServer, engine: SystemProcess) -> None:
        """Make the requests: the workload, and as many as are to come online."""
        self._arguments = arguments
        self._server = server
        self._engine = engine
        tokenizer = Tokenizer(arguments.model)
        self._workload = make_turns(arguments.sizes, arguments.model, arguments.sizes.requests, seed=0)
        self._task = [Request(tokenizer.encode(turn.prompt), turn.max_tokens) for turn in self._workload]
        self._online = make_turns(arguments.sizes, arguments.model, arguments.count, seed=1)
        self._arrivals = poisson(arguments.count, arguments.rate, seed=1)
        self.alone: list[dict[str, float]] = []
        self.served: list[dict[str, float]] = []
        self.online: list[dict[str, float]] = []

    def run_alone(self) -> dict[str, float]:
        """The workload on the engine process, while the server is idle."""
        before = sum(cpu_seconds(self._server).values())
        task = Task("workload", "workload", self._task)
        outcome = self._engine.run(task.requests)
        check(task, outcome)
        idle = sum(cpu_seconds(self._server).values()) - before
        return {"requests/s": len(task.requests) / outcome.wall, "idle server, cpu s": idle}

    def run_served(self) -> dict[str, float]:
        """The workload through the server, while the engine process is frozen."""
        before = cpu_seconds(self._server)
        at_once = [None] * len(self._workload)
        result = generate_load(self._server.grpc_url, self._workload, at_once, self._arguments.streams)
        used = {f"{kind}, cpu s": seconds - before[kind] for kind, seconds in cpu_seconds(self._server).items()}
        rate = len(self._workload) / result.wall
        return {"requests/s": rate, **used, "load generator, cpu s": result.cpu, **latencies(result)}

    def run_online(self) -> dict[str, float]:
        """The arrivals, through the server."""
        result = generate_load(self._server.grpc_url, self._online, self._arrivals, self._arguments.streams)
        offered = (len(self._arrivals) - 1) / self._arrivals[-1]
        rates = {"offered requests/s": offered, "requests/s": len(self._online) / result.wall}
        return {**rates, "load generator, cpu s": result.cpu, **latencies(result)}

    def round(self, counted: bool) -> Iterator[str]:
        """Everything once; says what comes next."""
        for name, measure, runs in (
            ("engine alone", self.run_alone, self.alone),
            ("served", self.run_served, self.served),
            ("online", self.run_online, self.online),
        ):
            yield name
            if name == "online" and not counted:
                continue  # the workload has warmed everything
            result = measure()
            if counted:
                runs.append(result)


def measure_memory(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """A server with a small pool: time to ready, memory then, and memory after a whole workload."""
    turns = make_turns(arguments.sizes, arguments.model, arguments.sizes.requests, seed=0)
    with serving(arguments, arguments.memory_slots, console) as (server, seconds):
        ready = memory(server)
        generate_load(server.grpc_url, turns, [None] * len(turns), arguments.streams)
        return {"slots": arguments.memory_slots, "seconds to ready": seconds, "ready": ready, "loaded": memory(server)}


def spreads(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Every number over all rounds."""
    return {name: spread([run[name] for run in runs]) for name in runs[0]}


def show(result: dict[str, Any], console: Console) -> None:
    """Three tables, and the goals."""
    table = Table(title="medians over rounds (least to greatest)")
    for column in ("", "engine alone", "served", "online"):
        table.add_column(column, justify="right" if column else "left")
    parts = [result[part] for part in ("engine alone", "served", "online")]
    for name in dict.fromkeys(name for part in parts for name in part):
        table.add_row(name, *(cell(part[name]) if name in part else "" for part in parts))
    console.print(table)
    space = result["memory"]
    usage = Table(title=f"memory in GB with {space['slots']} slots: when ready, and after the workload")
    usage.add_column("process")
    columns = [(moment, name) for moment in ("ready", "loaded") for name in space["ready"]["all"]]
    for moment, name in columns:
        usage.add_column(f"{name.removesuffix(' GB')}, {moment}", justify="right")
    for kind in space["ready"]:
        usage.add_row(kind, *(f"{space[moment][kind][name]:.3f}" for moment, name in columns))
    console.print(usage)
    ratio = result["served / engine alone"]
    console.print(f"served / engine alone: {cell(ratio)} (goal at least {GOALS['served / engine alone']})")
    resident = space["loaded"]["all"]["resident GB"]
    console.print(f"resident, all processes: {resident:.2f} GB (goal below {GOALS['resident GB']})")
    starts = cell(result["seconds to ready"])
    console.print(f"start to ready: {starts} s (goal below {GOALS['seconds to ready']:g})")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.served", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2.2, help="requests per second, online")
    parser.add_argument("--count", type=int, default=128, help="requests, online")
    parser.add_argument("--memory-slots", type=int, default=4096, help="K/V pool when memory is measured, in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that warms up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="tiny tasks that only show that everything works")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "served.json")
    arguments = parser.parse_args()
    arguments.sizes = Sizes.quick() if arguments.quick else Sizes()
    if arguments.quick:
        arguments.count = min(arguments.count, 6)
    return arguments


def main() -> int:
    """Measure, write, show."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the engine may be frozen: we must end it, on every way out
    console = Console(width=None if sys.stdout.isatty() else 120)
    sizes = arguments.sizes
    slots = sizes.max_running * sizes.max_tokens
    with console.status("memory"):
        space = measure_memory(arguments, console)
    system = dataclasses.replace(SYSTEMS["ours"], options={})
    options = {"threads": arguments.threads, "dtype": "bf16", "weights": arguments.quantization}
    options |= {"max_running": sizes.max_running, "max_tokens": sizes.max_tokens}
    with (
        SystemProcess("engine-alone", system, arguments.threads) as engine,
        serving(arguments, slots, console) as (server, seconds),
    ):
        info = engine.load(arguments.model, options)["info"]
        comparison = Comparison(arguments, server, engine)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=3 * (arguments.rounds + 1))
            for number in range(arguments.rounds + 1):
                for name in comparison.round(counted=number > 0):
                    progress.update(bar, description=f"round {number}: {name}", advance=1)
    pairs = zip(comparison.served, comparison.alone, strict=True)
    result = {
        "date": date.today().isoformat(),
        "command": "make bench-served",
        "machine": machine(),
        "model": arguments.model.name,
        "kernels": info["kernels"],
        "quantization": arguments.quantization,
        "threads": arguments.threads,
        "streams": arguments.streams,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "engine alone": spreads(comparison.alone),
        "served": spreads(comparison.served),
        "served / engine alone": spread([served["requests/s"] / alone["requests/s"] for served, alone in pairs]),
        "online": {"rate": spread([arguments.rate]), **spreads(comparison.online)},
        "memory": space,
        "seconds to ready": spread([space["seconds to ready"], seconds]),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    show(result, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
