"""One server of a tiny model, idle between tests: what is tested here is the load generator, not the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from loadtest.measurement import Target, serving

TINY = {"dtype": "float32", "threads": 1, "kernels": "torch"}


@pytest.fixture(scope="session")
def target(tiny_llama: Path) -> Iterator[Target]:
    with serving({"model": str(tiny_llama), "limits.max_model_len": 256, **TINY}, Console(stderr=True)) as target:
        yield target


@pytest.fixture
def engine(target: Target) -> psutil.Process:
    """The engine process behind the server."""
    processes = [psutil.Process(pid) for pid in target.pids()]
    (found,) = [process for process in processes if "orca_backend.engine" in process.cmdline()]
    return found
