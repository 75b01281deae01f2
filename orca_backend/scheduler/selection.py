"""Who goes first in an iteration, and with how many tokens: the `selection` part of the scheduler.

Each of them fills a batch with the two steps that Algorithm 1 takes at once: `resume` those that have started, `join`
those that wait.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import msgspec

from orca_backend.request import Sequence, State, TokenEvent

if TYPE_CHECKING:
    from orca_backend.scheduler.pool import RequestPool
    from orca_backend.scheduler.scheduler import Scheduler

FINISHED = State.FINISHED


class Selection(Protocol):
    """One per scheduler."""

    def select(self, scheduler: Scheduler, batch: list[Sequence]) -> None:
        """Fill the empty `batch`."""
        ...

    def settle(self, pool: RequestPool, events: list[TokenEvent]) -> tuple[list[TokenEvent], list[Sequence]]:
        """Which of `events` leave now, and the sequences to let go of."""
        ...

    def withdraw(self, seq: Sequence) -> bool:
        """Take back the answer of `seq`, which has ended and not left; False: it was given."""
        ...


class Orca:
    """Algorithm 1: whole prompts and single tokens, whoever started first."""

    def select(self, scheduler: Scheduler, batch: list[Sequence]) -> None:
        """Fill the empty `batch`."""
        scheduler.resume(batch, scheduler.ready())
        scheduler.join(batch)

    def settle(self, pool: RequestPool, events: list[TokenEvent]) -> tuple[list[TokenEvent], list[Sequence]]:
        """Every event leaves, and so does every sequence that has ended."""
        return events, [
            seq for event in events if event.finish_reason is not None and (seq := pool.get(event.request_id))
        ]

    def withdraw(self, seq: Sequence) -> bool:
        """Answers are given at once."""
        return False


class TokenBudget(Orca):
    """Chunked prefill (Sarathi-Serve): single tokens first, then prompts that have begun, then new ones.

    What the budget leaves of a prompt comes in later iterations, so no prompt delays the others' next token by more
    than the budget (stall-free).
    """

    def select(self, scheduler: Scheduler, batch: list[Sequence]) -> None:
        """Fill the empty `batch`."""
        ready = list(scheduler.ready())
        scheduler.resume(batch, [seq for seq in ready if seq.num_tokens - seq.num_computed == 1])
        scheduler.resume(batch, [seq for seq in ready if seq.num_tokens - seq.num_computed > 1 and seq.block_ids])
        scheduler.join(batch)


class PrefillFirst(Orca):
    """Whole prompts of new sequences as long as any can start, by themselves; single tokens only otherwise."""

    def select(self, scheduler: Scheduler, batch: list[Sequence]) -> None:
        """Fill the empty `batch`."""
        scheduler.join(batch)
        if not batch:
            scheduler.resume(batch, scheduler.ready())


class Static(Orca):
    """Request-level batches, as serving systems run them around FasterTransformer (paper sections 2 and 6.2).

    A batch is formed from waiting requests only when none runs, and runs until its last member ends. Members that have
    ended stay in it as rows that compute a known token and sample nothing: they cost what they cost in such a system.
    Answers are complete ones, given when the batch ends; a member that fails or is cancelled learns of it at once.
    The first iteration takes whole prompts of different lengths, which is fairer than the paper's baseline. One batch
    at a time, hence one iteration in flight.
    """

    chunk = sys.maxsize  # most tokens of a member in an iteration that is not its first

    def __init__(self) -> None:
        """No batch runs."""
        self._withheld: dict[int, TokenEvent] = {}  # answers of ended members, by request id

    def select(self, scheduler: Scheduler, batch: list[Sequence]) -> None:
        """The batch that runs, all of it; if none does, the first that fit together."""
        if scheduler.n_scheduled:
            return
        scheduler.resume(batch, scheduler.ready(), self.chunk)
        if not batch:
            scheduler.join(batch)

    def settle(self, pool: RequestPool, events: list[TokenEvent]) -> tuple[list[TokenEvent], list[Sequence]]:
        """Withhold complete answers until every member has ended, then let the whole batch go."""
        leaving: list[TokenEvent] = []
        gone: list[Sequence] = []
        for event in events:
            seq = pool.get(event.request_id)
            assert seq is not None
            if event.finish_reason in ("stop", "length"):
                self._withheld[event.request_id] = msgspec.structs.replace(event, token_ids=seq.output_ids)
            elif event.finish_reason is not None:
                leaving.append(event)
                if not seq.block_ids:  # ended while waiting: in no batch
                    gone.append(seq)
        members = list(pool.started.values())
        for seq in members:
            if seq.state is not FINISHED:
                return leaving, gone
        leaving += self._withheld.values()
        self._withheld.clear()
        return leaving, gone + members

    def withdraw(self, seq: Sequence) -> bool:
        """Take back the answer of `seq` while it is withheld; its row stays."""
        return self._withheld.pop(seq.request_id, None) is not None


class StaticShortest(Static):
    """The paper's own baseline: the first iteration takes as many tokens of every prompt as the shortest one has.

    The rest of the longer prompts goes in one token per iteration, as generation does (section 6.2).
    """

    chunk = 1

    def select(self, scheduler: Scheduler, batch: list[Sequence]) -> None:
        """As Static."""
        super().select(scheduler, batch)
        if batch and not batch[0].iterations:
            shortest = min(seq.scheduled for seq in batch)
            for seq in batch:
                seq.scheduled = shortest


SELECTIONS: dict[str, type[Orca]] = {
    "orca": Orca,
    "token_budget": TokenBudget,
    "prefill_first": PrefillFirst,
    "static": Static,
    "static_shortest": StaticShortest,
}
