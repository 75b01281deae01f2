"""The room as a whole: what it may import, and that waiting costs nothing."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

import orca_backend
from orca_backend.config import SchedulerConfig
from orca_backend.request import Request
from orca_backend.scheduler.iteration import IterationResult
from orca_backend.scheduler.policies import make_scheduler

ROOT = Path(orca_backend.__file__).parent.parent
FORBIDDEN = {"torch", "grpc", "time", "threading", "socket", "asyncio", "multiprocessing", "subprocess", "datetime"}


def imports(path: Path) -> set[str]:
    """Names of all modules that this file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


ROOM = sorted((ROOT / "orca_backend" / "scheduler").glob("*.py"))


@pytest.mark.parametrize("path", ROOM, ids=lambda path: path.name)
def test_imports_neither_tensors_nor_network_nor_clock(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN


def test_no_tensors_behind_its_imports_either() -> None:
    """Follows the project's own modules to the end of the chain."""
    seen: set[Path] = set()
    pending = set(ROOM)
    while pending:
        path = pending.pop()
        seen.add(path)
        names = imports(path)
        assert not {name.split(".")[0] for name in names} & {"torch", "grpc", "numpy", "transformers"}, path
        own = {ROOT / (name.replace(".", "/") + ".py") for name in names if name.startswith("orca_backend.")}
        pending |= {module for module in own if module.exists()} - seen
    assert ROOT / "orca_backend" / "request.py" in seen


def microseconds_per_iteration(waiting: int, running: int = 32) -> float:
    """Fastest schedule() + update() while `running` sequences run and `waiting` wait."""
    config = SchedulerConfig(max_bs=running)
    scheduler = make_scheduler(config, n_slots=running * 1000, block_size=1, max_model_len=1000)
    for request_id in range(running + waiting):
        scheduler.submit(Request(request_id=request_id, prompt_ids=[1] * 10, max_new_tokens=900))
    best = float("inf")
    for iteration_id in range(1, 60):
        started = time.perf_counter()
        assert scheduler.schedule() is not None
        scheduler.update(IterationResult(iteration_id=iteration_id, sampled=[7] * running))
        best = min(best, time.perf_counter() - started)
    return best * 1e6


def test_those_that_wait_cost_nothing() -> None:
    """100,000 that wait may not slow an iteration; looking at each of them would, a hundred times."""
    assert microseconds_per_iteration(waiting=100_000) < 5 * microseconds_per_iteration(waiting=0)
