"""Host work per iteration outside the forward pass, with a full batch decoding: `make bench-overhead`.

The engine process runs alone. Over a window in which every iteration decodes the whole batch, the host work is the wall
time of the window less the time in the model: scheduling, batch building, sampling, event passing, and waiting for one
another. Exit code 1 if the median of any kind of sampling is not below the limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine_process import EngineProcess
from orca_backend.config import EngineConfig, KVCacheConfig, SchedulerConfig

LIMIT_MS = 3.0
MODES = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k + top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "everything": {"temperature": 0.8, "min_p": 0.01, "top_p": 0.95, "repetition_penalty": 1.1, "min_tokens": 8},
}


def measure(engine: EngineProcess, batch: int, iterations: int, sampling: dict[str, float]) -> dict[str, float]:
    """Milliseconds per iteration of one window of `iterations` decode iterations of `batch` rows."""
    engine.reports.clear()
    for i in range(batch):
        engine.submit([1 + i, 2, 3, 4], iterations + 8, seed=i, **sampling)
    full: list = []
    stamps: list[float] = []
    while any(answer.finish_reason is None for answer in engine.answers.values()):
        seen = len(engine.reports)
        engine.receive()
        if len(engine.reports) > seen and engine.reports[-1].num_rows == batch == engine.reports[-1].num_tokens:
            full.append(engine.reports[-1])
            stamps.append(time.perf_counter())
    # The first full iteration only opens the window.
    count = len(full) - 1
    wall = (stamps[-1] - stamps[0]) / count
    window = full[1:]
    forward = sum(report.forward_seconds for report in window) / count
    sample = sum(report.sample_seconds for report in window) / count
    build = sum(report.run_seconds for report in window) / count - forward - sample
    schedule = sum(report.schedule_seconds for report in window) / count
    seconds = {
        "wall": wall,
        "forward": forward,
        "host": wall - forward,
        "schedule": schedule,
        "build": build,
        "sample": sample,
        "events and waiting": wall - forward - sample - build - schedule,
    }
    return {name: 1e3 * value for name, value in seconds.items()}


def main() -> int:
    """Measure every mode several times, print medians, write JSON; 0 if every median is below the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("bench/results/overhead.json"))
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model,
        scheduler=SchedulerConfig(max_bs=arguments.batch),
        kv_cache=KVCacheConfig(n_slots=arguments.batch * 128),
    )
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    console = Console()
    with EngineProcess(config) as engine, console.status("measuring") as status:
        for repeat in range(arguments.repeat):
            for mode, sampling in MODES.items():
                status.update(f"run {repeat + 1} of {arguments.repeat}: {mode}")
                runs[mode].append(measure(engine, arguments.batch, arguments.iterations, sampling))
        info = engine.info
    medians = {mode: {key: statistics.median(run[key] for run in of) for key in of[0]} for mode, of in runs.items()}
    title = f"{info.model_name}, {info.dtype}, {info.device}: ms per iteration of {arguments.batch} rows, medians"
    table = Table(title=title)
    columns = list(medians["greedy"])
    for column in ("sampling", *columns):
        table.add_column(column, justify="right")
    for mode, row in medians.items():
        table.add_row(mode, *(f"{row[column]:.2f}" for column in columns))
    console.print(table)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "command": "make bench-overhead",
        "model": info.model_name,
        "dtype": info.dtype,
        "batch": arguments.batch,
        "milliseconds": {mode: {key: round(value, 3) for key, value in row.items()} for mode, row in medians.items()},
        "host_runs": {mode: [round(run["host"], 3) for run in of] for mode, of in runs.items()},
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    worst = max(row["host"] for row in medians.values())
    console.print(f"host work: at most {worst:.2f} ms per iteration (limit {LIMIT_MS} ms)")
    return 0 if worst < LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
