"""Schedule the next iteration while the last one still computes, on the assumption that its sequences go on.

The scheduler is told at once that an iteration has returned, with PENDING in the place of its tokens; so it schedules
the next one with PENDING as inputs, which the runner takes from the device. When the tokens are there, they take their
places. Ends by length are known beforehand. An end by a stop token is seen one iteration late: one row is wasted, its
token is dropped, and its K/V goes to slots that others get only in iterations that run after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from orca_backend.engine.sequence_table import PENDING
from orca_backend.request import FinishReason, Request, Sequence, TokenEvent
from orca_backend.scheduler.iteration import IterationBatch, IterationResult, Occupancy
from orca_backend.scheduler.scheduler import Scheduler
from orca_backend.scheduler.selection import Static

DEPTH = 2  # iterations in flight: one computes, one waits behind it


@dataclass(frozen=True)
class _Promise:
    """A token that is not known yet: its row, and its sequence and the index in its output."""

    row: int
    event: TokenEvent
    sequence: Sequence
    index: int


class Lookahead:
    """A Scheduler of one worker with up to two iterations in flight; every method as there.

    Not for policies that preempt, cache prefixes or keep ended members in a batch: these look at tokens.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Take over a scheduler that has no work. Raises ValueError for one that looks at tokens."""
        if not self.suits(scheduler):
            raise ValueError("the policy needs the tokens of an iteration before it can schedule the next")
        self._scheduler = scheduler
        self._in_flight: deque[tuple[IterationBatch, float, list[_Promise]]] = deque()
        self._ended: set[int] = set()  # told of their end, perhaps with tokens on their way that nobody wants
        self._seconds = 0.0  # that the last iteration took
        self._last_return = 0.0

    @staticmethod
    def suits(scheduler: Scheduler) -> bool:
        """Whether it never looks at tokens."""
        return (
            scheduler.n_workers == 1
            and scheduler.preemption is None
            and scheduler.kv.cache is None
            and not isinstance(scheduler.selection, Static)
        )

    def schedule(self, now: float = 0.0) -> IterationBatch | None:
        """The next iteration, or None if there is nothing to run or two are in flight."""
        if len(self._in_flight) == DEPTH:
            return None
        batch = self._scheduler.schedule(now)
        if batch is None:
            return None
        sampled = [PENDING if row.sample else -1 for row in batch.rows]
        provisional = IterationResult(iteration_id=batch.iteration_id, sampled=sampled)
        members = {row.request_id: self._scheduler.pool.get(row.request_id) for row in batch.rows}
        events = {event.request_id: event for event in self._scheduler.update(provisional, now + self._seconds)}
        promises = []
        for i, row in enumerate(batch.rows):
            sequence = members[row.request_id]
            if row.sample and sequence is not None:
                promises.append(_Promise(i, events[row.request_id], sequence, len(sequence.output_ids) - 1))
        self._in_flight.append((batch, now, promises))
        return batch

    def update(self, result: IterationResult, now: float = 0.0) -> list[TokenEvent]:
        """The tokens of the oldest iteration in flight are there. Raises KeyError if it is another one."""
        promises = self._returned(result.iteration_id, now)
        events: list[TokenEvent] = []
        for promise in promises:
            request = promise.sequence.request
            token = result.sampled[promise.row]
            if token < 0:
                message = result.failed.get(request.request_id, "no token was sampled")
                events += self._fail(promise, message)
            elif request.request_id not in self._ended:
                promise.sequence.output_ids[promise.index] = token
                reason = promise.event.finish_reason
                if token in request.stop_token_ids:
                    reason = "stop"
                if reason is not None:
                    self._end(request.request_id)
                events.append(msgspec.structs.replace(promise.event, token_ids=[token], finish_reason=reason))
        self._forget()
        return events

    def fail_iteration(self, iteration_id: int, message: str) -> list[TokenEvent]:
        """The iteration was lost: those who wait for a token of it, or whose prompt was in it, end with an error."""
        if not self._in_flight or self._in_flight[0][0].iteration_id != iteration_id:
            raise KeyError(iteration_id)
        batch, _, promises = self._in_flight.popleft()
        events = [event for promise in promises for event in self._fail(promise, message)]
        for row in batch.rows:
            if not row.sample and row.request_id not in self._ended:
                self._end(row.request_id)
                events.append(_error(row.request_id, message))
        self._forget()
        return events

    def submit(self, request: Request, now: float = 0.0) -> None:
        """As of Scheduler."""
        self._scheduler.submit(request, now)

    def cancel(self, request_id: int, reason: FinishReason = "cancelled") -> list[TokenEvent]:
        """As of Scheduler; always at once, also when all that is left of the request is on its way."""
        events = self._scheduler.cancel(request_id, reason)
        waited_for = {promise.event.request_id for _, _, promises in self._in_flight for promise in promises}
        if not events and request_id in waited_for - self._ended:
            events = [TokenEvent(request_id=request_id, finish_reason=reason)]
        return self._note(events)

    def expire(self, now: float) -> list[TokenEvent]:
        """As of Scheduler; always at once."""
        return self._note(self._scheduler.expire(now))

    @property
    def next_expiry(self) -> float:
        """As of Scheduler."""
        return self._scheduler.next_expiry

    @property
    def n_scheduled(self) -> int:
        """Iterations in flight."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request has not had its last event."""
        return self._scheduler.has_work or bool(self._in_flight)

    def occupancy(self) -> Occupancy:
        """As of Scheduler."""
        return self._scheduler.occupancy()

    def _returned(self, iteration_id: int, now: float) -> list[_Promise]:
        if not self._in_flight or self._in_flight[0][0].iteration_id != iteration_id:
            raise KeyError(iteration_id)
        _, started, promises = self._in_flight.popleft()
        self._seconds = now - max(started, self._last_return)  # it began when the one before it was over
        self._last_return = now
        return promises

    def _fail(self, promise: _Promise, message: str) -> list[TokenEvent]:
        request_id = promise.sequence.request_id
        if request_id in self._ended:
            return []
        self._end(request_id)
        return [_error(request_id, message)]

    def _end(self, request_id: int) -> None:
        """Let the scheduler go on without it, if it does not already: nothing of its own event is passed on."""
        self._scheduler.cancel(request_id)
        self._ended.add(request_id)

    def _note(self, events: list[TokenEvent]) -> list[TokenEvent]:
        self._ended.update(event.request_id for event in events if event.finish_reason)
        return events

    def _forget(self) -> None:
        """Remember the ended only as long as a token of theirs is on its way."""
        self._ended &= {row.request_id for batch, _, _ in self._in_flight for row in batch.rows}


def _error(request_id: int, message: str) -> TokenEvent:
    return TokenEvent(request_id=request_id, finish_reason="error", code="INTERNAL", message=message)
