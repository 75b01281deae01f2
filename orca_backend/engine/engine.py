"""The engine loop: control messages in, iterations out, one report per returned iteration.

One thread owns the scheduler. It sleeps on one inbox in which messages from the stub and results from the worker meet,
so it never polls, and never waits for a client, a tokenizer or a sender.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from orca_backend.channel import Cancel, Channel, Heartbeat, IterationReport, Message, Shutdown, Submit
from orca_backend.engine.recorder import Recorder
from orca_backend.engine.worker import IterationFailed, LaunchingRunner, Runner, Worker
from orca_backend.request import Request, TokenEvent
from orca_backend.scheduler.iteration import IterationBatch, IterationResult
from orca_backend.scheduler.scheduler import Rejected, Scheduler

if TYPE_CHECKING:
    from orca_backend.engine.lookahead import Lookahead

HEARTBEAT_SECONDS = 0.25
MOST_FAILURES = 3  # iterations in a row, then the process ends: a GPU that has failed once fails until a new one begins

logger = logging.getLogger(__name__)


class _Scheduled(NamedTuple):
    """An iteration in flight: when it was scheduled, by time.monotonic(), and how long that took."""

    batch: IterationBatch
    started: float
    schedule_seconds: float


class Engine:
    """Runs requests that come over `channel` until a Shutdown message; `vocab_size` bounds the prompt ids."""

    def __init__(
        self,
        channel: Channel,
        scheduler: Scheduler | Lookahead,
        runner: Runner | LaunchingRunner,
        vocab_size: int,
        recorder: Recorder,
        *,
        iteration_timeout: float = math.inf,
    ) -> None:
        """Wire the parts; nothing runs before `run`.

        While an iteration takes longer than `iteration_timeout` seconds there are no heartbeats: whoever listens sees
        that the engine hangs, and replaces it.
        """
        self._channel = channel
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self.recorder = recorder
        self._iteration_timeout = iteration_timeout
        self._last_return = 0.0  # by time.monotonic()
        self._failures = 0  # iterations in a row
        self._inbox: queue.SimpleQueue[Message | IterationResult | IterationFailed] = queue.SimpleQueue()
        self._worker = Worker(runner, self._inbox.put)
        self._in_flight: dict[int, _Scheduled] = {}  # by iteration id

    def run(self) -> None:
        """Serve until Shutdown. The process ends at once when the other side of the channel is gone.

        Raises RuntimeError when MOST_FAILURES iterations in a row have failed.
        """
        threading.Thread(target=self._read_channel, name="channel", daemon=True).start()
        try:
            self._serve()
        except ConnectionError:  # told before the channel's thread is: no failure of the engine's
            _end_alone()
        except Exception as error:
            self.recorder.write_failure(f"{type(error).__name__}: {error}")
            raise
        self._worker.close()

    def _serve(self) -> None:
        """The loop."""
        next_heartbeat = 0.0
        while True:
            wake = min(next_heartbeat, self._scheduler.next_expiry)
            try:
                item = self._inbox.get(timeout=max(0.0, wake - time.monotonic()))
            except queue.Empty:
                late = self._expire()
                self._dispatch()  # into the slots of those that have expired
                self._send(late)
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
                    if not self._hangs():
                        self._channel.send(Heartbeat(self._scheduler.occupancy()))
                continue
            if isinstance(item, Shutdown):
                break
            report = self._handle(item)
            late = self._expire()
            # All that has arrived counts for the next iteration, and that iteration starts before anybody is told of
            # the last one: passing events overlaps with computing.
            if self._inbox.empty():
                self._dispatch()
            self._send(report)
            self._send(late)  # after the tokens that they still got
            if self._failures == MOST_FAILURES:
                raise RuntimeError(f"{MOST_FAILURES} iterations in a row have failed")

    def _hangs(self) -> bool:
        """Whether the iteration that runs takes too long."""
        if not self._in_flight:
            return False
        running = next(iter(self._in_flight.values()))
        return time.monotonic() - max(running.started, self._last_return) > self._iteration_timeout

    def _send(self, report: IterationReport | None) -> None:
        if report is not None:
            self._channel.send(report)

    def _handle(self, item: Message | IterationResult | IterationFailed) -> IterationReport | None:
        """Apply one message or result to the scheduler; the news it makes for the stub."""
        if isinstance(item, IterationResult):
            return self._returned(item, self._scheduler.update(item, time.monotonic()))
        if isinstance(item, IterationFailed):
            return self._returned(item, self._scheduler.fail_iteration(item.iteration_id, item.message))
        if isinstance(item, Submit):
            events = self._submit(item.request)
        elif isinstance(item, Cancel):
            events = self._scheduler.cancel(item.request_id, item.reason)
        else:
            raise TypeError(f"not a message for the engine: {type(item).__name__}")
        self.recorder.told(events)
        return IterationReport(events=events, occupancy=self._scheduler.occupancy()) if events else None

    def _submit(self, request: Request) -> list[TokenEvent]:
        try:
            if not all(0 <= token < self._vocab_size for token in request.prompt_ids):
                raise Rejected(f"the prompt has token ids outside the vocabulary of {self._vocab_size}")
            self._scheduler.submit(request, time.monotonic())
        except Rejected as error:
            event = TokenEvent(
                request_id=request.request_id, finish_reason="error", code="INVALID_ARG", message=str(error)
            )
            return [event]
        self.recorder.arrived(request)
        return []

    def _expire(self) -> IterationReport | None:
        """End what can no longer be served in time, also while an iteration runs; the news."""
        if (now := time.monotonic()) < self._scheduler.next_expiry:
            return None
        events = self._scheduler.expire(now)
        self.recorder.told(events)
        return IterationReport(events=events, occupancy=self._scheduler.occupancy()) if events else None

    def _dispatch(self) -> None:
        """Algorithm 1: keep up to n_workers iterations in flight."""
        while True:
            started = time.monotonic()
            batch = self._scheduler.schedule(started)
            if batch is None:
                return
            self._worker.submit(batch)
            self._in_flight[batch.iteration_id] = _Scheduled(batch, started, time.monotonic() - started)

    def _returned(self, result: IterationResult | IterationFailed, events: list[TokenEvent]) -> IterationReport:
        """One iteration is over, for better or worse: note it down, and report what came of it."""
        batch, started, schedule_seconds = self._in_flight.pop(result.iteration_id)
        self._last_return = time.monotonic()
        self._failures = self._failures + 1 if isinstance(result, IterationFailed) else 0
        occupancy = self._scheduler.occupancy()
        failed, run_seconds = "", 0.0
        if isinstance(result, IterationFailed):
            failed = result.message
        else:
            run_seconds = result.seconds
        self.recorder.told(events)
        self.recorder.returned(
            batch,
            scheduled=started,
            schedule_seconds=schedule_seconds,
            run_seconds=run_seconds,
            occupancy=occupancy,
            failed=failed,
        )
        if isinstance(result, IterationFailed):
            return IterationReport(events=events, occupancy=occupancy)
        joined = [sequence.request_id for sequence in batch.joining]
        return IterationReport(
            iteration_id=result.iteration_id,
            num_rows=len(batch.rows),
            num_prefill_rows=sum(row.num_tokens > 1 or row.request_id in joined for row in batch.rows),
            num_tokens=len(batch.token_ids),
            started=started,
            joined=joined,
            schedule_seconds=schedule_seconds,
            run_seconds=run_seconds,
            forward_seconds=result.forward_seconds,
            sample_seconds=result.sample_seconds,
            events=events,
            occupancy=occupancy,
        )

    def _read_channel(self) -> None:
        try:
            while True:
                self._inbox.put(self._channel.receive())
        except EOFError:
            _end_alone()


def _end_alone() -> None:
    """Nobody is left to answer to, and nothing is held that outlives the process."""
    logger.warning("the serving side is gone; the engine ends")
    os._exit(0)
