"""The worker: runs iterations one after the other, in the order they were submitted, beside the engine loop.

A runner that can launch an iteration without waiting for it gets the next one meanwhile.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from orca_backend.scheduler.iteration import IterationBatch, IterationResult

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What a worker drives."""

    def run(self, batch: IterationBatch) -> IterationResult:
        """Run one iteration of the model."""
        ...


class Pending(Protocol):
    """An iteration that was launched."""

    def wait(self) -> IterationResult:
        """Its result, when it is there."""
        ...


@runtime_checkable
class LaunchingRunner(Protocol):
    """A runner that need not be waited for."""

    def launch(self, batch: IterationBatch) -> Pending:
        """Submit one iteration of the model, behind those that were launched before."""
        ...


class IterationFailed(msgspec.Struct, frozen=True, kw_only=True):
    """An iteration that raised: none of its rows has a token."""

    iteration_id: int
    message: str


class Worker:
    """A thread around a runner. `deliver` is called on that thread with every result."""

    def __init__(
        self, runner: Runner | LaunchingRunner, deliver: Callable[[IterationResult | IterationFailed], None]
    ) -> None:
        """Start the thread."""
        self._runner = runner
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[IterationBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def submit(self, batch: IterationBatch) -> None:
        """Queue one iteration; returns at once."""
        self._inbox.put(batch)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        launched: deque[tuple[IterationBatch, Pending]] = deque()
        while True:
            if launched and (len(launched) > 1 or self._inbox.empty()):
                batch, pending = launched.popleft()
                self._guard(batch, pending.wait)
                continue
            following = self._inbox.get()
            if following is None:
                break
            if isinstance(self._runner, LaunchingRunner):
                try:
                    launched.append((following, self._runner.launch(following)))
                except Exception as error:
                    for earlier, pending in launched:  # results come in order
                        self._guard(earlier, pending.wait)
                    launched.clear()
                    self._deliver(_failed(following, error))
            else:
                self._guard(following, functools.partial(self._runner.run, following))
        for batch, pending in launched:
            self._guard(batch, pending.wait)

    def _guard(self, batch: IterationBatch, run: Callable[[], IterationResult]) -> None:
        """Deliver a result. The engine outlives a bad iteration: its members fail, everybody else goes on."""
        try:
            result: IterationResult | IterationFailed = run()
        except Exception as error:
            result = _failed(batch, error)
        self._deliver(result)


def _failed(batch: IterationBatch, error: Exception) -> IterationFailed:
    logger.error("iteration %d failed:", batch.iteration_id, exc_info=error)
    return IterationFailed(iteration_id=batch.iteration_id, message=f"{type(error).__name__}: {error}")
