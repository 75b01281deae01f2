"""The flight recorder: the last iterations of an engine, kept in memory, and written to a file when somebody asks.

It runs in every iteration, so it keeps references to what is there anyway; what can be derived is derived when a
recording is written. SIGUSR1 asks for one: a signal also reaches an engine whose loop or worker hangs.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from orca_backend.config import RecorderConfig
from orca_backend.request import Request, TokenEvent
from orca_backend.scheduler.iteration import IterationBatch, Occupancy, Row
from orca_backend.timeline.recording import IterationRecord, Record, Recording, RequestRecord, recording_path, write

logger = logging.getLogger(__name__)


class _Returned(NamedTuple):
    """One iteration, as cheaply as it can be kept."""

    id: int
    scheduled: float
    returned: float
    schedule_seconds: float
    run_seconds: float
    rows: list[Row]
    occupancy: Occupancy
    joined: list[int]
    left: list[int]
    preempted: list[int]
    failed: str


class Recorder:
    """A ring of the last `config.capacity` iterations, and the requests that were there. For the engine's thread."""

    def __init__(self, config: RecorderConfig, *, model: str, policy: str) -> None:
        """Start empty. Recordings go to `config.path`."""
        self._capacity = config.capacity
        self._model = model
        self._policy = policy
        self._directory = Path(config.path)
        self._ring: deque[_Returned] = deque()
        self._requests: dict[int, RequestRecord] = {}  # those alive, and those that left in an iteration of the ring
        self._left: list[int] = []  # since the last iteration
        self._failure_kept_until = 0  # the first iteration whose ring does not show it

    def arrived(self, request: Request) -> None:
        """The scheduler has taken a request."""
        if self._capacity:
            self._requests[request.request_id] = RequestRecord(
                id=request.request_id,
                arrived=time.monotonic(),
                prompt_tokens=len(request.prompt_ids),
                max_new_tokens=request.max_new_tokens,
                priority=request.priority,
                tenant=request.tenant,
            )

    def told(self, events: list[TokenEvent]) -> None:
        """News of requests: some may have ended."""
        for event in events:
            if event.finish_reason is not None and (request := self._requests.get(event.request_id)) is not None:
                request.ended = time.monotonic()
                request.end = event.finish_reason
                self._left.append(request.id)
        if len(self._left) > 2 * self._capacity:  # no iteration returns, and requests are refused meanwhile
            self._forget_unseen()

    def _forget_unseen(self) -> None:
        """Forget those of the requests that have left which no iteration of the ring shows."""
        seen = {row.request_id for returned in self._ring for row in returned.rows}
        for request_id in self._left:
            if request_id not in seen:
                del self._requests[request_id]
        self._left = [request_id for request_id in self._left if request_id in seen]

    def returned(
        self,
        batch: IterationBatch,
        *,
        scheduled: float,
        schedule_seconds: float,
        run_seconds: float,
        occupancy: Occupancy,
        failed: str = "",
    ) -> None:
        """An iteration has returned, and what it meant has been `told`. `scheduled` is a value of time.monotonic()."""
        if not self._capacity:
            return
        preempted = [i for i in batch.dropped if i in self._requests and self._requests[i].ended is None]
        left, self._left = self._left, []
        self._ring.append(
            _Returned(
                id=batch.iteration_id,
                scheduled=scheduled,
                returned=time.monotonic(),
                schedule_seconds=schedule_seconds,
                run_seconds=run_seconds,
                rows=batch.rows,
                occupancy=occupancy,
                joined=[sequence.request_id for sequence in batch.joining],
                left=left,
                preempted=preempted,
                failed=failed,
            )
        )
        if len(self._ring) > self._capacity:
            for request_id in self._ring.popleft().left:
                self._requests.pop(request_id, None)
        if failed and batch.iteration_id >= self._failure_kept_until:
            self._failure_kept_until = batch.iteration_id + self._capacity  # until then this recording shows it too
            self.write_failure(failed)

    def write(self) -> None:
        """Write a recording because somebody asked for it; never raises."""
        self._write("somebody asked", recording_path(self._directory, os.getpid()))

    def write_failure(self, why: str) -> None:
        """Write a recording because of a failure, beside those that were asked for; never raises."""
        path = recording_path(self._directory, os.getpid(), failure=True)
        if self._write(f"of a failure: {why}", path):
            logger.warning("what led to it is in %s (see orca timeline)", path)

    def _write(self, reason: str, path: Path) -> bool:
        try:
            write(self._records(reason), path)
        except OSError as error:
            logger.warning("the flight recorder cannot write: %s", error)
            return False
        return True

    def _records(self, reason: str) -> list[Record]:
        recording = Recording(
            model=self._model,
            policy=self._policy,
            pid=os.getpid(),
            reason=reason,
            monotonic=time.monotonic(),
            unix=time.time(),
        )
        return [recording, *self._requests.values(), *map(self._record, self._ring)]

    def _record(self, returned: _Returned) -> IterationRecord:
        prefill = sum(row.num_tokens for row in returned.rows if self._is_prefill(row))
        occupancy = returned.occupancy
        return IterationRecord(
            id=returned.id,
            policy=self._policy,
            scheduled=returned.scheduled,
            returned=returned.returned,
            schedule_seconds=returned.schedule_seconds,
            run_seconds=returned.run_seconds,
            rows=returned.rows,
            prefill_tokens=prefill,
            decode_tokens=sum(row.num_tokens for row in returned.rows) - prefill,
            running=occupancy.running,
            waiting=occupancy.waiting,
            slots_reserved=occupancy.slots_reserved,
            slots_used=occupancy.slots_used,
            slots_total=occupancy.slots_total,
            joined=returned.joined,
            left=returned.left,
            cancelled=[i for i in returned.left if self._requests[i].end == "cancelled"],
            preempted=returned.preempted,
            failed=returned.failed,
        )

    def _is_prefill(self, row: Row) -> bool:
        """Also of a sequence that was preempted, and computes again what it had."""
        request = self._requests.get(row.request_id)
        return row.num_tokens > 1 or (request is not None and row.start < request.prompt_tokens)
