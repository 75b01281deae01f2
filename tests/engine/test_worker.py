"""The worker's thread: order, failures, and runners that need not be waited for."""

from __future__ import annotations

import queue
import threading

from orca_backend.engine.worker import IterationFailed, Worker
from orca_backend.scheduler.iteration import IterationBatch, IterationResult


def batch(i: int) -> IterationBatch:
    return IterationBatch(iteration_id=i, rows=[], token_ids=[])


class Launcher:
    """Launches at once."""

    def __init__(self) -> None:
        self.launched: list[int] = []

    def launch(self, batch: IterationBatch):
        if batch.iteration_id == 13:
            raise RuntimeError("cannot launch")
        self.launched.append(batch.iteration_id)
        return Launched(self, batch.iteration_id)


class Launched:
    def __init__(self, launcher: Launcher, iteration_id: int) -> None:
        self.launcher, self.iteration_id = launcher, iteration_id

    def wait(self) -> IterationResult:
        if self.iteration_id == 1:
            assert self.launcher.launched == [1, 2]  # it was not waited for before the next one was launched
        if self.iteration_id == 3:
            raise RuntimeError("lost")
        return IterationResult(iteration_id=self.iteration_id, sampled=[])


def test_the_next_iteration_is_launched_before_the_last_is_waited_for():
    results: queue.SimpleQueue[IterationResult | IterationFailed] = queue.SimpleQueue()
    started = threading.Event()

    class Held(Launcher):
        def launch(self, batch):
            started.wait(60)  # until everything is queued
            return super().launch(batch)

    worker = Worker(Held(), results.put)
    for i in (1, 2, 3, 13, 4):
        worker.submit(batch(i))
    started.set()
    worker.close()
    outcomes = [results.get(timeout=60) for _ in range(5)]
    assert [outcome.iteration_id for outcome in outcomes] == [1, 2, 3, 13, 4]
    assert [isinstance(outcome, IterationFailed) for outcome in outcomes] == [False, False, True, True, False]
    assert outcomes[2].message == "RuntimeError: lost"
    assert outcomes[3].message == "RuntimeError: cannot launch"
