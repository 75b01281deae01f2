"""A witness of the scheduler: drives it as an engine would and holds every answer against its own account.

The account is kept in the plainest way (sort, sum, compare), independent of how the scheduler keeps its own, down to
what every K/V slot would contain. After every call all invariants are asserted, so a test only has to make things
happen.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from orca_backend.config import SchedulerConfig
from orca_backend.request import Request, SamplerSettings, State, TokenEvent
from orca_backend.scheduler.iteration import IterationBatch, IterationResult
from orca_backend.scheduler.policies import make_scheduler

Expected = tuple[int, tuple[int, ...], str | None]  # request id, tokens, finish reason


@dataclass
class Account:
    """What the witness knows of one request that has not left."""

    request: Request
    arrival: int
    arrived: float
    begun: bool = False  # has been in an iteration
    started: bool = False  # holds slots
    running: bool = False
    aborted: str | None = None  # "cancelled" or "error" (too late), while running
    ended: str | None = None  # why it stopped generating
    answered: bool = False
    iterations: int = 0
    written: int = 0  # tokens whose K/V is in the cache
    scheduled: int = 0
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.request.prompt_ids + self.output

    def contents(self) -> list[int]:
        """What stands for the K/V of every known token: it depends on all tokens up to it, and on whose they are."""
        chain = itertools.accumulate(self.known, lambda before, token: hash((before, token)), initial=self.owner)
        return list(chain)[1:]

    @property
    def owner(self) -> int:
        return hash((self.request.tenant, self.request.cache_salt))


class Witness:
    """One scheduler, the requests it was given, and the iterations it has in flight. `now` is the time it is told."""

    def __init__(
        self,
        policy: str = "orca",
        *,
        max_bs: int = 4,
        n_workers: int = 1,
        n_slots: int = 1000,
        block_size: int = 1,
        max_model_len: int = 1000,
        prefix_cache: bool = False,
        swap_slots: int = 0,
        **settings: Any,
    ) -> None:
        self.config = SchedulerConfig(policy=policy, max_bs=max_bs, n_workers=n_workers, **settings)  # type: ignore[arg-type]
        self.order, self.admission, self.selection, self.preemption = self.config.parts
        self.static = self.selection.startswith("static")
        self.reserves = self.admission in ("orca", "max")
        self.max_bs, self.n_workers = max_bs, n_workers
        self.max_model_len = max_model_len
        self.block_size, self.n_blocks = block_size, n_slots // block_size
        self.scheduler = make_scheduler(
            self.config,
            n_slots=n_slots,
            block_size=block_size,
            max_model_len=max_model_len,
            prefix_cache=prefix_cache,
            swap_slots=swap_slots,
        )
        self.prefix_cache = prefix_cache
        self.now = 0.0
        self.slowest = 0.0  # iteration
        self.pool: dict[int, Account] = {}  # in arrival order
        self.in_flight: deque[tuple[IterationBatch, float]] = deque()
        self.runner: set[int] = set()  # ids that a runner remembers
        self.to_drop: set[int] = set()
        self.device: list[Any] = [None] * self.n_blocks * block_size  # content of every slot
        self.host: list[Any] = [None] * (swap_slots // block_size) * block_size
        self.events: list[TokenEvent] = []
        self.batches: list[list[int]] = []  # ids of every iteration so far
        self.preemptions = 0
        self.iteration_ids = itertools.count(1)
        self.arrivals = itertools.count()

    # ---- what can happen

    def submit(
        self,
        request_id: int,
        prompt: int,
        generate: int,
        stop: list[int] | None = None,
        *,
        shared: int = 0,
        min_tokens: int = 0,
        **more: Any,
    ) -> None:
        """A request of `prompt` input tokens, the first `shared` of a stem common to all, that generates `generate`."""
        prompt_ids = [10**9 + i if i < shared else 1000 * request_id + i for i in range(prompt)]
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_new_tokens=generate,
            stop_token_ids=stop or [],
            sampling=SamplerSettings(min_tokens=min_tokens),
            **more,
        )
        self.scheduler.submit(request, self.now)
        self.pool[request_id] = Account(request, next(self.arrivals), self.now)
        self.events = [event for event in self.events if event.request_id != request_id]  # an id that is free again
        self._check()

    def cancel(self, request_id: int) -> list[TokenEvent]:
        """A client goes away."""
        expected = self._abort(request_id, "cancelled") if request_id in self.pool else []
        return self._got(self.scheduler.cancel(request_id), expected)

    def wait(self, seconds: float) -> list[TokenEvent]:
        """Time passes, and the engine wakes at the end of it."""
        self.now += seconds
        before = {i: account.aborted for i, account in self.pool.items()}
        events = self.scheduler.expire(self.now)
        seen = {i: self.scheduler.pool.get(i) for i in self.pool}
        late = [
            i
            for i, account in self.pool.items()
            if account.running and before[i] is None and (seq := seen[i]) and seq.ending is not None
        ]
        told = [event.request_id for event in events if event.finish_reason == "error"]
        for i in late + told:
            assert self._too_late(self.pool[i]), "ended although it could be served in time"
        expected = [end for i in late + told for end in self._abort(i, "error")]
        for i, account in self.pool.items():
            if not account.answered and not account.aborted:
                assert not self._must_have_expired(account), f"{i} should have been ended by now"
        assert self.scheduler.next_expiry > self.now
        return self._got(events, expected, code="UNAVAILABLE")

    def schedule(self) -> IterationBatch | None:
        """The engine asks for work."""
        expected = self._expected_batch()
        batch = self.scheduler.schedule(self.now)
        preempted = {i for i, a in self.pool.items() if a.started and self._state(i) is State.PREEMPTED}
        for i in preempted:
            account = self.pool[i]
            assert self.preemption != "none"
            assert not account.running, "its blocks were taken while an iteration in flight writes them"
            account.started = False
            account.blocks = []
            self.to_drop.add(i)
            self.preemptions += 1
        if batch is None:
            assert not expected, f"nothing scheduled although {expected} can run"
            assert self.in_flight or not self.pool, "no progress: nothing runs, and nothing is started"
            self._check()
            return None
        ids = [row.request_id for row in batch.rows]
        assert expected is None or ids == expected
        assert 0 < len(ids) == len(set(ids)) <= self.max_bs
        assert self.config.budget is None or len(batch.token_ids) <= self.config.budget
        assert batch.iteration_id == next(self.iteration_ids)
        self._take_in(batch)
        self._check_starts([joiner.request_id for joiner in batch.joining])
        tokens = iter(batch.token_ids)
        for row in batch.rows:
            account = self.pool[row.request_id]
            assert not account.running, "in two iterations at once"
            end = row.start + row.num_tokens
            if account.ended is None:
                assert row.start == account.written
                assert row.num_tokens > 0
                assert row.sample == (end == len(account.known))
                if self.selection in ("orca", "static", "prefill_first"):
                    assert row.sample, "a prompt in pieces"
                account.scheduled = row.num_tokens
                account.running = True
            else:
                assert self.static
                assert not row.sample
                assert (row.start, row.num_tokens) == (account.written - 1, 1), "an ended member needs no new slot"
            assert list(itertools.islice(tokens, row.num_tokens)) == account.known[row.start : end]
            self._compute(account, row.start, end)
        assert not list(tokens)
        self.in_flight.append((batch, self.now))
        self.batches.append(ids)
        self._check()
        return batch

    def complete(self, tokens: list[int] | None = None, failed: tuple[int, ...] = ()) -> list[TokenEvent]:
        """The oldest iteration returns: `tokens` are what its rows sample (7 without), rows in `failed` have none."""
        batch, began = self.in_flight.popleft()
        self.slowest = max(self.slowest, self.now - began)
        ids = [row.request_id for row in batch.rows]
        sampled = [-1 if i in failed or not row.sample else 7 for i, row in zip(ids, batch.rows, strict=True)]
        if tokens is not None:
            sampled = [token if old >= 0 else old for token, old in zip(tokens, sampled, strict=True)]
        expected = self._returned(batch, sampled, set(failed))
        result = IterationResult(
            iteration_id=batch.iteration_id, sampled=sampled, failed=dict.fromkeys(failed, "not a number")
        )
        return self._got(self.scheduler.update(result, self.now), expected)

    def lose(self) -> list[TokenEvent]:
        """The oldest iteration fails as a whole."""
        batch, _ = self.in_flight.popleft()
        ids = [row.request_id for row in batch.rows]
        expected = self._returned(batch, [-1] * len(ids), set(ids))
        return self._got(self.scheduler.fail_iteration(batch.iteration_id, "device lost"), expected)

    def step(self) -> list[TokenEvent]:
        """Fill the pipeline, then let its oldest iteration return."""
        while self.schedule():
            pass
        return self.complete()

    def drain(self) -> None:
        """Run until nothing is left: it must end, and nothing may be held then.

        Who is first computes at least one token in every iteration, and never loses what it has.
        """
        bound = sum(account.request.max_tokens for account in self.pool.values()) + len(self.in_flight)
        for _ in range(bound):
            if self.scheduler.has_work:
                self.step()
        assert not self.pool, "no progress"
        assert not self.scheduler.has_work
        occupancy = self.scheduler.occupancy()
        assert (occupancy.running, occupancy.waiting) == (0, 0)
        assert (occupancy.slots_reserved, occupancy.slots_used) == (0, 0)
        assert self.scheduler.next_expiry == math.inf
        if self.preemption == "swap":
            assert sorted(self.scheduler.preemption._free) == list(range(len(self.host) // self.block_size))

    # ---- what has to follow

    def slots(self, account: Account) -> int:
        """Slots that a reserving admission takes, in whole blocks."""
        limit = min(self.max_model_len, self.n_blocks * self.block_size)
        tokens = account.request.max_tokens if self.admission == "orca" else limit
        return math.ceil(tokens / self.block_size) * self.block_size

    def _expected_batch(self) -> list[int] | None:
        """Algorithm 1 as printed; static policies run their batch, or form one by the same rule. None: not foreseen."""
        if len(self.in_flight) == self.n_workers:
            return []
        if (
            not self.reserves
            or self.prefix_cache
            or self.order != "fcfs"
            or self.selection in ("token_budget", "prefill_first")
        ):
            return None
        if self.static and (self.in_flight or any(account.started for account in self.pool.values())):
            return [] if self.in_flight else [i for i, account in self.pool.items() if account.started]
        n_rsrv = sum(self.slots(account) for account in self.pool.values() if account.started)
        batch: list[int] = []
        for i, account in self.pool.items():
            if account.running:
                continue
            if len(batch) == self.max_bs:
                break
            if not account.started:
                n_rsrv += self.slots(account)
                if n_rsrv > self.n_blocks * self.block_size:
                    break
            batch.append(i)
        return batch

    def _check_starts(self, joining: list[int]) -> None:
        """Nobody who waits has a better claim than those who start."""
        if self.order in ("fair", "cached"):
            return
        waiting = [account for account in self.pool.values() if not account.started]
        best = min((self.key(account) for account in waiting), default=(math.inf, 0))
        assert all(self.key(self.pool[i]) < best for i in joining)

    def key(self, account: Account) -> tuple[float, int]:
        """The order of service, spelt out."""
        request, config = account.request, self.config
        expected = request.expected_tokens or request.max_new_tokens
        due = account.arrived + config.slack_seconds if request.deadline is None else request.deadline
        by = {
            "fcfs": 0.0,
            "priority": account.arrived + request.priority * config.priority_seconds,
            "shortest": account.arrived + expected * config.token_seconds,
            "deadline": due + expected * config.token_seconds,
        }
        return by[self.order], account.arrival

    def _take_in(self, batch: IterationBatch) -> None:
        """What a runner does before it computes: tables, then copies."""
        in_flight = {
            block
            for other, _ in self.in_flight
            for row in other.rows
            for block in self.pool[row.request_id].blocks[self.pool[row.request_id].written // self.block_size :]
        }
        assert sorted(batch.dropped) == sorted(self.to_drop), "the runner is told of each that leaves, once"
        self.runner -= self.to_drop
        self.to_drop.clear()
        ids = [row.request_id for row in batch.rows]
        assert [joiner.request_id for joiner in batch.joining] == [i for i in ids if not self.pool[i].started]
        for pairs, source, target in (
            (batch.swapped_out, self.device, self.host),
            (batch.copied, self.device, self.device),
            (batch.swapped_in, self.host, self.device),
        ):
            size = self.block_size
            for a, b in pairs:
                target[b * size : (b + 1) * size] = source[a * size : (a + 1) * size]
        for joiner in batch.joining:
            account = self.pool[joiner.request_id]
            assert joiner.request_id not in self.runner
            assert joiner.prompt_ids == account.request.prompt_ids
            assert joiner.output_ids == account.output
            assert joiner.stop_token_ids == account.request.stop_token_ids
            if self.reserves:
                assert len(joiner.block_ids) * self.block_size == self.slots(account)
            account.begun = account.started = True
            account.written = next(row.start for row in batch.rows if row.request_id == joiner.request_id)
            assert account.written < len(account.known), "nothing is left to compute"
            if not self.prefix_cache and not batch.swapped_in:
                assert account.written == 0
            self._new_blocks(account, joiner.block_ids, in_flight)
        for i, blocks in batch.new_blocks.items():
            assert not self.reserves
            self._new_blocks(self.pool[i], blocks, in_flight)
        self.runner.update(ids)

    def _new_blocks(self, account: Account, blocks: list[int], in_flight: set[int]) -> None:
        account.blocks = account.blocks + blocks
        fresh = account.blocks[account.written // self.block_size :]
        assert not in_flight & set(fresh), "an iteration in flight still writes these blocks"

    def _compute(self, account: Account, start: int, end: int) -> None:
        """Read the K/V of all tokens before `start`, write those up to `end`."""
        slots = [b * self.block_size + i for b in account.blocks for i in range(self.block_size)]
        assert end <= len(slots)
        contents = account.contents()
        assert [self.device[slot] for slot in slots[:start]] == contents[:start], "K/V of other tokens"
        for other in self.pool.values():
            if other is not account and other.started:
                first, last = start // self.block_size, -(-end // self.block_size)
                assert not set(account.blocks[first:last]) & set(other.blocks), "writes to a shared block"
        for slot, content in zip(slots[start:end], contents[start:end], strict=True):
            self.device[slot] = content

    def _returned(self, batch: IterationBatch, sampled: list[int], failed: set[int]) -> list[Expected]:
        events: list[Expected] = []
        for row, token in zip(batch.rows, sampled, strict=True):
            account = self.pool[row.request_id]
            account.running = False
            if account.ended:
                continue
            account.iterations += 1
            account.written += account.scheduled
            if account.aborted:
                events.append(self._end(account, account.aborted))
            elif row.request_id in failed or (row.sample and token < 0):
                events.append(self._end(account, "error"))
            elif row.sample:
                account.output.append(token)
                if token in account.request.stop_token_ids:
                    events.append(self._end(account, "stop", token))
                elif len(account.output) == account.request.max_new_tokens:
                    events.append(self._end(account, "length", token))
                else:
                    events.append((row.request_id, (token,), None))
        return self._settle(events)

    def _abort(self, request_id: int, reason: str) -> list[Expected]:
        account = self.pool[request_id]
        if account.answered:
            return []
        if account.running and not account.ended:
            account.aborted = reason
            return []
        return self._settle([self._end(account, reason)])

    @staticmethod
    def _end(account: Account, reason: str, *token: int) -> Expected:
        account.ended = reason
        return account.request.request_id, token, reason

    def _settle(self, events: list[Expected]) -> list[Expected]:
        if self.static:
            events = [event for event in events if event[2] in ("cancelled", "error")]
        for i, _, reason in events:
            if reason is not None:
                self.pool[i].answered = True
                if not self.static or not self.pool[i].started:
                    self._leave(i)
        members = {i: account for i, account in self.pool.items() if account.started}
        if self.static and all(account.ended for account in members.values()):
            events += [(i, tuple(a.output), a.ended) for i, a in members.items() if not a.answered]
            for i in members:
                self._leave(i)
        return events

    def _leave(self, request_id: int) -> None:
        if self.pool.pop(request_id).started:
            self.to_drop.add(request_id)

    def _too_late(self, account: Account) -> bool:
        """Whether ending it early can be right, at the slowest pace there was."""
        request = account.request
        expected = request.expected_tokens or request.sampling.min_tokens
        left = max(1, expected - len(account.output)) * self.slowest
        overdue = request.deadline is not None and self.now + left >= request.deadline
        return overdue or self._waited_too_long(account)

    def _must_have_expired(self, account: Account) -> bool:
        deadline = account.request.deadline
        return (deadline is not None and self.now >= deadline) or self._waited_too_long(account)

    def _waited_too_long(self, account: Account) -> bool:
        limit = self.config.max_queue_seconds
        return limit is not None and not account.begun and self.now >= account.arrived + limit

    def _state(self, request_id: int) -> State:
        seq = self.scheduler.pool.get(request_id)
        assert seq is not None
        return seq.state

    def _got(self, events: list[TokenEvent], expected: list[Expected], code: str = "INTERNAL") -> list[TokenEvent]:
        got = [(event.request_id, tuple(event.token_ids), event.finish_reason) for event in events]
        assert sorted(got, key=str) == sorted(expected, key=str)
        for event in events:
            if event.finish_reason == "error":
                assert event.message
                assert event.code in (code, "UNAVAILABLE")  # too late while running: told when it returns
            else:
                assert (event.code, event.message) == ("", "")
        self.events += events
        self._check()
        return events

    def _check(self) -> None:
        """The invariants that hold at every moment."""
        scheduler = self.scheduler
        occupancy = scheduler.occupancy()
        assert scheduler.n_scheduled == len(self.in_flight) <= self.n_workers
        assert scheduler.has_work == bool(self.pool)
        members = Counter(row.request_id for batch, _ in self.in_flight for row in batch.rows)
        assert not members or max(members.values()) == 1, "a sequence is in two iterations in flight"
        started = [account for account in self.pool.values() if account.started]
        assert occupancy.running == len(started) <= self.max_bs * self.n_workers
        assert occupancy.waiting == len(self.pool) - len(started)
        assert occupancy.preemptions == self.preemptions
        held = {block for account in started for block in account.blocks}
        assert occupancy.slots_reserved == len(held) * self.block_size <= scheduler.kv.n_slots
        if not self.prefix_cache:
            assert occupancy.slots_used == sum(a.written for a in started)
            assert len(held) == sum(len(account.blocks) for account in started), "a block twice"
        cached = list(scheduler.kv.cache.unused) if scheduler.kv.cache else []
        free = scheduler.kv._free
        assert sorted([*held, *free, *cached]) == list(range(self.n_blocks)), "free + held = total, each once"
        references = Counter(block for account in started for block in account.blocks)
        assert scheduler.kv._references == [references[block] for block in range(self.n_blocks)]
        if self.reserves and not self.prefix_cache:
            assert occupancy.slots_reserved == sum(self.slots(a) for a in started)
        if self.admission in ("orca", "max", "peak") and self.preemption == "none":
            assert not scheduler._short, "ran short of what was reserved"
        if self.order == "fcfs" and self.selection == "orca" and self.preemption == "none":
            counts = [account.iterations for account in self.pool.values() if not account.ended]
            assert counts == sorted(counts, reverse=True), "a later arrival has run more iterations"
        ends = Counter(event.request_id for event in self.events if event.finish_reason is not None)
        assert not ends or max(ends.values()) == 1, "two terminal events"
