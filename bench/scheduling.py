"""The scheduler by itself, with a stand-in engine of constant cost: `make bench-scheduling`.

First a million requests through every policy: all must end, and nothing may be held afterwards. Then the time of one
`schedule()` (and one `update()`) with 256 running and 100, 10,000 and 100,000 waiting, kept so by new arrivals. Exit
code 1 if the median of `schedule()` passes the limit, or if requests are left.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orca_backend.config import POLICIES, SchedulerConfig
from orca_backend.request import Request
from orca_backend.scheduler.iteration import IterationBatch, IterationResult
from orca_backend.scheduler.policies import make_scheduler

LIMIT_US = 200.0
BLOCK_SIZE = 16


def result_of(batch: IterationBatch) -> IterationResult:
    """What the stand-in engine returns: the same token for every row that samples."""
    return IterationResult(iteration_id=batch.iteration_id, sampled=[7 if row.sample else -1 for row in batch.rows])


@dataclass
class Drained:
    """How many requests went through, and what it took. `left` counts what did not end or was still held: 0."""

    requests: int
    iterations: int
    seconds: float
    preemptions: int
    left: int


def drain(policy: str, requests: int, max_bs: int = 32, seed: int = 0) -> Drained:
    """Send `requests` short requests through `policy`, 1,000 waiting at a time, in a pool that is too small."""
    generator = random.Random(seed)
    scheduler = make_scheduler(
        SchedulerConfig(policy=policy),
        n_slots=max_bs * 2 * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=64,
    )
    submitted = ended = iterations = 0
    started = time.perf_counter()
    while submitted < requests or scheduler.has_work:
        for _ in range(min(1000 - scheduler.occupancy().waiting, requests - submitted)):
            prompt = [1] * generator.randint(1, 30)
            scheduler.submit(Request(request_id=submitted, prompt_ids=prompt, max_new_tokens=generator.randint(1, 32)))
            submitted += 1
        batch = scheduler.schedule()
        if batch is None:
            break
        iterations += 1
        ended += sum(event.finish_reason is not None for event in scheduler.update(result_of(batch)))
    occupancy = scheduler.occupancy()
    left = requests - ended + occupancy.running + occupancy.waiting + occupancy.slots_reserved
    return Drained(requests, iterations, time.perf_counter() - started, occupancy.preemptions, left)


def latencies(
    policy: str, running: int, waiting: int, iterations: int, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Microseconds of each `schedule()` and each `update()` with `running` and `waiting` requests.

    Prompts of 1 to 100 tokens and outputs of 1 to 400, so that somebody ends in most iterations, and somebody starts.
    """
    generator = random.Random(seed)
    budget = {"token_budget": 2 * running} if POLICIES[policy].selection == "token_budget" else {}
    scheduler = make_scheduler(
        SchedulerConfig(policy=policy, max_bs=running, **budget),
        n_slots=running * 512,
        block_size=BLOCK_SIZE,
        max_model_len=512,
    )
    submitted = 0

    def arrive(count: int) -> None:
        nonlocal submitted
        for _ in range(count):
            prompt = [1] * generator.randint(1, 100)
            scheduler.submit(Request(request_id=submitted, prompt_ids=prompt, max_new_tokens=generator.randint(1, 400)))
            submitted += 1

    arrive(running + waiting)
    schedule: list[float] = []
    update: list[float] = []
    for i in range(2 * iterations):
        began = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        assert batch is not None
        result = result_of(batch)
        returned = time.perf_counter()
        scheduler.update(result)
        ended = time.perf_counter()
        if i >= iterations:  # before, the batch fills
            schedule.append(1e6 * (scheduled - began))
            update.append(1e6 * (ended - returned))
        arrive(waiting - len(scheduler.pool.waiting))
    return schedule, update


def main() -> int:
    """Measure every policy, print two tables, write JSON; 0 if all drained and none was over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--output", type=Path, default=Path("bench/results/scheduling.json"))
    arguments = parser.parse_args()
    console = Console()
    cost = Table(title=f"µs per iteration, {arguments.running} running: median (99th percentile)")
    for column in ("policy", "waiting", "schedule", "update"):
        cost.add_column(column, justify="left" if column == "policy" else "right")
    through = Table(title=f"{arguments.requests:,} requests")
    for column in ("policy", "seconds", "iterations", "µs per iteration", "preemptions", "left"):
        through.add_column(column, justify="left" if column == "policy" else "right")
    result: dict[str, dict[str, object]] = {}
    failed = False
    with console.status("measuring") as status:
        for policy in arguments.policies:
            rows: dict[str, dict[str, float]] = {}
            for waiting in arguments.waiting:
                status.update(f"{policy}: {waiting:,} waiting")
                times = latencies(policy, arguments.running, waiting, arguments.iterations)
                row: dict[str, float] = {}
                cells = []
                for name, values in zip(("schedule", "update"), times, strict=True):
                    median, tail = statistics.median(values), statistics.quantiles(values, n=100)[98]
                    row |= {f"{name}_median_us": round(median, 1), f"{name}_p99_us": round(tail, 1)}
                    cells.append(f"{median:.0f} ({tail:.0f})")
                cost.add_row(policy, f"{waiting:,}", *cells)
                rows[str(waiting)] = row
                failed |= row["schedule_median_us"] > LIMIT_US
            status.update(f"{policy}: {arguments.requests:,} requests")
            drained = drain(policy, arguments.requests)
            failed |= drained.left != 0
            per_iteration = 1e6 * drained.seconds / drained.iterations
            cells = [f"{drained.seconds:.0f}", f"{drained.iterations:,}", f"{per_iteration:.0f}"]
            through.add_row(policy, *cells, f"{drained.preemptions:,}", str(drained.left))
            result[policy] = {"waiting": rows, "drained": {**vars(drained), "seconds": round(drained.seconds, 1)}}
    console.print(cost)
    console.print(through)
    document = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "command": "make bench-scheduling",
        "running": arguments.running,
        "policies": result,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
