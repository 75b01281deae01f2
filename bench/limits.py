"""What this machine can do at best, right now: streaming reads and bf16 matrix products. Run as a process of its own.

python -m bench.limits CHECKPOINT THREADS       prints one JSON line: "read GB/s", "tflops"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.peers import matrix_rate
from bench.peers.environments import ROOT

_BUFFER_BYTES = 512 << 20  # far beyond any last-level cache
_PASSES = 6


def read_rate() -> float:
    """Gigabytes per second of the best pass over a large buffer: a vectorized maximum, which does nothing but read."""
    buffer = torch.ones(_BUFFER_BYTES // 8, dtype=torch.int64)

    def one_pass() -> float:
        started = time.perf_counter()
        buffer.amax()
        return time.perf_counter() - started

    return _BUFFER_BYTES / min(one_pass() for _ in range(_PASSES)) / 1e9


def measure_limits(checkpoint: Path, threads: int) -> dict[str, float]:
    """Measure in a fresh process: {"read GB/s": ..., "tflops": ...}."""
    command = [sys.executable, "-m", "bench.limits", str(checkpoint), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    limits: dict[str, float] = json.loads(output)
    return limits


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    print(json.dumps({"read GB/s": read_rate(), "tflops": matrix_rate.measure(config)["tflops"]}))
