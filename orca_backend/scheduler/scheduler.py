"""Iteration-level scheduling: Algorithm 1 of the Orca paper (section 4.2), and what the listing leaves open.

Before every iteration the scheduler selects who runs in it; after every iteration it learns what came out. Left open
by the listing and defined here: an empty selection is never dispatched nor counted; what cannot fit in an empty pool is
refused when submitted; an ended sequence leaves the pool before the next selection; a cancelled one that is in an
iteration in flight ends when that returns, so nobody else gets K/V slots that are still being written.

What makes a policy is four parts in modules of their own: order, admission, selection, preemption. With "orca" for all
of them this is the paper's scheduler. Pure book-keeping for one thread: no tensors, no I/O, and no clock: times are
given, in seconds of any one clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from orca_backend.config import SchedulerConfig
from orca_backend.request import FinishReason, Request, Sequence, State, TokenEvent
from orca_backend.scheduler.admission import Admission
from orca_backend.scheduler.deadlines import Deadlines
from orca_backend.scheduler.iteration import IterationBatch, IterationResult, JoiningSequence, Occupancy, Row
from orca_backend.scheduler.kv_manager import KVManager
from orca_backend.scheduler.pool import RequestPool
from orca_backend.scheduler.preemption import Recompute
from orca_backend.scheduler.selection import Selection

# Bound here because looking a member up on the enum costs more than building a Row (Python 3.11).
INITIATION, RUNNING, INCREMENT = State.INITIATION, State.RUNNING, State.INCREMENT
PREEMPTED, FINISHED = State.PREEMPTED, State.FINISHED


class Rejected(ValueError):
    """The request can never be served as it is; the message says why."""


class Scheduler:
    """The paper's scheduler. Every method is to be called from the one thread that owns it.

    Made by `make_scheduler`. Results are expected in the order of their iterations, as a pipeline of workers returns
    them. Then, under FCFS without preemption, of any two sequences in the pool the earlier arrival has run at least as
    many iterations (iteration-level FCFS).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        pool: RequestPool,
        kv: KVManager,
        admission: Admission,
        selection: Selection,
        preemption: Recompute | None,
    ) -> None:
        """Put the parts together; `max_model_len` bounds prompt plus generated tokens. `preemption` None: never."""
        self.max_bs = config.max_bs
        self.n_workers = config.n_workers
        self.max_model_len = max_model_len
        self.pool = pool
        self.kv = kv
        self._cache = kv.cache
        self.admission = admission
        self.selection = selection
        self.preemption = preemption
        self._budget = config.budget or sys.maxsize
        self._deadlines = Deadlines(config.max_queue_seconds)
        self._in_flight: dict[int, tuple[list[Sequence], float]] = {}  # members and start by iteration id
        self._last_iteration_id = 0
        self._dropped: list[int] = []  # have left since the last batch: the runner still remembers them
        self._new_blocks: dict[int, list[int]] = {}  # taken for the next batch
        self._left = 0  # tokens that the iteration being selected has room for
        self._short = False  # in this selection somebody's next block was not free
        self._candidates: list[Sequence] = []  # with preemption: who may lose its blocks now, the first victim last
        self._preemptions = 0

    # ---- Algorithm 1; the numbers are the lines of the listing

    def schedule(self, now: float = 0.0) -> IterationBatch | None:
        """The next iteration to run, or None if there is nothing to run now or n_workers iterations are in flight."""
        if self.n_scheduled == self.n_workers:  # [9] one has to return first
            return None
        batch: list[Sequence] = []  # [18]
        self._left, self._short = self._budget, False
        self.selection.select(self, batch)  # [4] by calls of `resume` and `join`, in the paper one after the other
        if not batch:
            return None
        self._last_iteration_id += 1
        iteration = self._describe(batch)  # [5] the caller hands it to the engine
        for seq in batch:  # [6-7]
            if seq.state is not FINISHED:
                seq.state = RUNNING
        self.pool.waiting.serve(batch)
        self._in_flight[self._last_iteration_id] = batch, now  # [8] n_scheduled grows by one
        return iteration

    def resume(self, batch: list[Sequence], candidates: Iterable[Sequence], chunk: int = sys.maxsize) -> None:
        """Let sequences that have started run on, each with what is not computed of it, but at most `chunk` tokens."""
        max_bs, left = self.max_bs, self._left
        for seq in candidates:  # [19-20]
            if len(batch) == max_bs:  # [21-22]
                break
            computed = seq.num_computed
            num_tokens = seq.num_tokens - computed
            if num_tokens != 1:  # single tokens come first, and a budget has room for max_bs of them
                if not left:
                    break
                # An ended member of a static batch has nothing left to compute, and still costs a token.
                num_tokens = min(num_tokens, chunk, left) or 1
            if computed + num_tokens > seq.num_slots and not self._grow(seq, num_tokens):
                continue
            seq.scheduled = num_tokens
            left -= num_tokens
            batch.append(seq)  # [27]
        self._left = left

    def join(self, batch: list[Sequence]) -> None:
        """Let sequences that wait start, in their order, as long as the admission finds slots for them.

        The first that does not fit ends the selection: to skip it would let others overtake it. Nobody starts while
        somebody who has started is short of slots.
        """
        pool, kv = self.pool, self.kv
        while len(batch) < self.max_bs and self._left and not self._short:  # [21-22]
            seq = pool.waiting.first()  # [19-20]
            if seq is None or len(pool.started) == self.max_bs * self.n_workers:
                break
            prefix, saved = ([], 0) if seq.swapped_ids else kv.find_prefix(seq)
            reserved = self.admission.tokens(seq)  # [24]
            if not self.admission.admits(seq, kv.blocks_for(reserved) - saved):  # [25]
                break
            if seq.swapped_ids and self.preemption:
                kv.take(seq, reserved)
                self.preemption.restore(seq)
            else:
                kv.start(seq, reserved, prefix)  # [26]
            pool.start(seq)
            seq.scheduled = min(seq.num_tokens - seq.num_computed, self._left)
            self._left -= seq.scheduled
            batch.append(seq)  # [27]

    def update(self, result: IterationResult, now: float = 0.0) -> list[TokenEvent]:
        """What the returned iteration means for its members (lines 10-15 of the listing).

        Each of them that sampled or ended gets one event. A member without its token (`sampled` -1, or in `failed`)
        ends with an error; a `sampled` of the wrong length fails the iteration. Raises KeyError if no such iteration is
        in flight.
        """
        members, started = self._in_flight[result.iteration_id]
        if len(result.sampled) != len(members):
            message = f"{len(result.sampled)} tokens for {len(members)} sequences"
            return self.fail_iteration(result.iteration_id, message)
        del self._in_flight[result.iteration_id]
        if all(seq.scheduled == 1 for seq in members):  # what a token costs: a prompt costs more, once
            self._deadlines.observe(now - started)
        events, failed = [], result.failed
        for seq, token in zip(members, result.sampled, strict=True):
            if seq.state is RUNNING:
                event = self._advance(seq, token, failed.get(seq.request_id) if failed else None)
                if event is not None:  # else: a chunk of a prompt, not its last
                    events.append(event)
        return self._settle(events)

    # ---- Requests come and go

    def submit(self, request: Request, now: float = 0.0) -> None:
        """Put `request` into the pool. Raises Rejected for what could never run."""
        if request.request_id in self.pool:
            raise Rejected(f"request {request.request_id} is already being served")
        if not request.prompt_ids:
            raise Rejected("the prompt has no tokens")
        if request.max_new_tokens < 1:
            raise Rejected(f"at least 1 token must be asked for, got {request.max_new_tokens}")
        demand = f"{len(request.prompt_ids)} prompt tokens plus {request.max_new_tokens} to generate"
        if request.max_tokens > self.max_model_len:
            raise Rejected(f"{demand} exceed the limit of {self.max_model_len} tokens")
        if self.kv.blocks_for(request.max_tokens) > self.kv.n_blocks:
            raise Rejected(f"{demand} do not fit into the {self.kv.n_slots} K/V slots of this server")
        self._deadlines.watch(self.pool.insert(request, now))

    def cancel(self, request_id: int, reason: FinishReason = "cancelled") -> list[TokenEvent]:
        """End this request: at once if no iteration in flight computes it, else `update` brings its last event.

        That event's finish_reason is `reason`: whoever reads the text may know that it is complete.
        Ids that are unknown, have ended or are already cancelled are ignored.
        """
        seq = self.pool.get(request_id)
        return self._abort(seq, TokenEvent(request_id=request_id, finish_reason=reason)) if seq else []

    def expire(self, now: float) -> list[TokenEvent]:
        """End the requests that can no longer be served in time (see Deadlines), as `cancel` does, with an error."""
        events: list[TokenEvent] = []
        for seq, why in self._deadlines.expire(now):
            events += self._abort(seq, self._error(seq, why, "UNAVAILABLE"))
        return events

    @property
    def next_expiry(self) -> float:
        """When `expire` has to be called next; infinity: not at all."""
        return self._deadlines.next

    def fail_iteration(self, iteration_id: int, message: str) -> list[TokenEvent]:
        """The iteration was lost as a whole: its members end with an error and what they hold is freed.

        Raises KeyError if no such iteration is in flight.
        """
        members, _ = self._in_flight.pop(iteration_id)
        ends = [self._advance(seq, -1, message) for seq in members if seq.state is RUNNING]
        return self._settle([event for event in ends if event is not None])

    # ---- What there is

    @property
    def n_scheduled(self) -> int:
        """Iterations in flight."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return len(self.pool) > 0

    def occupancy(self) -> Occupancy:
        """How full the pool and the K/V slots are. O(running)."""
        started, cache = self.pool.started, self._cache
        reserved = self.kv.n_rsrv
        return Occupancy(
            running=len(started),
            waiting=len(self.pool.waiting),
            slots_reserved=reserved,
            # Tokens that are shared are counted for each that holds them, but there is no more than is reserved.
            slots_used=min(reserved, sum(seq.num_computed for seq in started.values())),
            slots_total=self.kv.n_slots,
            preemptions=self._preemptions,
            prefix_queries=cache.queries if cache else 0,
            prefix_hits=cache.hits if cache else 0,
        )

    def ready(self) -> Iterable[Sequence]:
        """Started sequences that are in no iteration in flight: in the order of starting, with preemption by rank."""
        if self.preemption is None:
            return self.pool.ready()
        self._candidates = sorted(self.pool.ready(), key=lambda seq: seq.rank)
        return list(self._candidates)

    # ---- Slots

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Take the blocks that `seq` needs next, if need be from those behind it; False: it must wait."""
        if seq.state is PREEMPTED:
            return False
        wanted = seq.num_computed + num_tokens
        while self.kv.blocks_for(wanted) - len(seq.block_ids) > self.kv.n_free:
            self._short = True
            if self.preemption is None or (victim := self._victim(seq)) is None:
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        self._new_blocks[seq.request_id] = self.kv.take(seq, wanted)
        return True

    def _victim(self, seq: Sequence) -> Sequence | None:
        """Who loses its blocks for `seq`: the last in rank, be it `seq` itself; None: an iteration in flight holds it.

        Only what can be freed now is considered, and never somebody before `seq`: so the first in rank always goes on.
        """
        last = self._candidates[-1]
        if last is seq and any(
            other.state is RUNNING and other.rank > seq.rank for other in self.pool.started.values()
        ):
            return None
        return self._candidates.pop()

    def _preempt(self, seq: Sequence) -> None:
        assert self.preemption is not None
        self.preemption.preempt(seq)
        seq.state = PREEMPTED
        self.pool.stop(seq)
        self._dropped.append(seq.request_id)
        self._preemptions += 1

    # ---- One sequence, one iteration

    def _describe(self, batch: list[Sequence]) -> IterationBatch:
        """The iteration as the engine gets it."""
        rows: list[Row] = []
        token_ids: list[int] = []
        joining: list[JoiningSequence] = []
        for seq in batch:
            request, state, start = seq.request, seq.state, seq.num_computed
            if state is FINISHED:  # kept in its batch: computes its last token once more, into the slot it has
                rows.append(Row(request.request_id, start - 1, 1, sample=False))
                token_ids += seq.tokens(start - 1, start)
                continue
            if state is INCREMENT and start + 1 == seq.num_tokens and seq.output_ids:
                rows.append(Row(request.request_id, start, 1))
                token_ids.append(seq.output_ids[-1])
                continue
            end = start + seq.scheduled
            rows.append(Row(request.request_id, start, seq.scheduled, end == seq.num_tokens))
            token_ids += seq.tokens(start, end)
            if state is not INCREMENT:
                joining.append(
                    JoiningSequence(
                        request_id=request.request_id,
                        prompt_ids=request.prompt_ids,
                        block_ids=list(seq.block_ids),
                        stop_token_ids=request.stop_token_ids,
                        sampling=request.sampling,
                        output_ids=list(seq.output_ids),
                    )
                )
        iteration = IterationBatch(
            iteration_id=self._last_iteration_id,
            rows=rows,
            token_ids=token_ids,
            joining=joining,
            new_blocks=self._new_blocks,
            dropped=self._dropped,
            copied=self.kv.copies,
            swapped_out=self.preemption.swapped_out if self.preemption else [],
            swapped_in=self.preemption.swapped_in if self.preemption else [],
        )
        self._new_blocks, self._dropped, self.kv.copies = {}, [], []
        if self.preemption:
            self.preemption.swapped_out, self.preemption.swapped_in = [], []
        return iteration

    def _advance(self, seq: Sequence, token: int, failure: str | None) -> TokenEvent | None:
        """`seq` comes back from an iteration with `token`, or with the reason why there is none."""
        request = seq.request
        seq.iterations += 1
        seq.num_computed += seq.scheduled
        if seq.ending is not None:
            return self._end(seq, seq.ending)
        if failure is not None:
            return self._end(seq, self._error(seq, failure))
        if self._cache is not None:
            self._cache.record(seq)
        if seq.num_computed < seq.num_tokens:
            seq.state = INCREMENT
            return None
        if token < 0:
            return self._end(seq, self._error(seq, "no token was sampled"))
        seq.output_ids.append(token)
        seq.num_tokens += 1
        reason: FinishReason | None = None
        if token in request.stop_token_ids:
            reason = "stop"
        elif len(seq.output_ids) == request.max_new_tokens:
            reason = "length"
        seq.state = FINISHED if reason else INCREMENT
        return TokenEvent(request_id=request.request_id, token_ids=[token], finish_reason=reason)

    def _abort(self, seq: Sequence, event: TokenEvent) -> list[TokenEvent]:
        """End `seq` with `event`: now, or when the iteration in flight returns that it is in."""
        self._deadlines.forget(seq)
        if seq.state is RUNNING:
            seq.ending = event
            return []
        if seq.state is FINISHED and not self.selection.withdraw(seq):
            return []  # has been told of its end, and only keeps its place in the batch
        return self._settle([self._end(seq, event)])

    @staticmethod
    def _end(seq: Sequence, event: TokenEvent) -> TokenEvent:
        seq.state = FINISHED
        return event

    @staticmethod
    def _error(seq: Sequence, message: str, code: str = "INTERNAL") -> TokenEvent:
        return TokenEvent(request_id=seq.request_id, finish_reason="error", code=code, message=message)

    def _settle(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Let go of the sequences that are done: the one place where they leave. The events that leave now."""
        leaving, gone = self.selection.settle(self.pool, events)
        for seq in gone:
            self.pool.remove(seq)
            self._deadlines.forget(seq)
            if seq.block_ids:
                self.kv.release(seq)
                self._dropped.append(seq.request_id)
            elif self.preemption is not None:
                self.preemption.forget(seq)
        return leaving
