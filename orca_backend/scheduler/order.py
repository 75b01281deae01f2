"""Who is next among those that wait: the `order` part of the scheduler.

Every order but `fair` is by a key that is fixed on arrival, in seconds. Because waiting counts in the same unit as what
is held against a request, ageing is built in: a request with key k starts before all that arrive after the clock has
passed k and have nothing in their favour.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from orca_backend.config import SchedulerConfig
from orca_backend.request import Sequence
from orca_backend.scheduler.lazy_heap import LazyHeap
from orca_backend.scheduler.prefix_cache import PrefixCache


class Queue(Protocol):
    """The sequences that wait."""

    def __len__(self) -> int:
        """How many wait."""
        ...

    def push(self, seq: Sequence) -> None:
        """Let `seq` wait; one that was preempted comes back to its old place."""
        ...

    def first(self) -> Sequence | None:
        """Who is next; stays in the queue."""
        ...

    def discard(self, seq: Sequence) -> None:
        """Let `seq` wait no longer, if it does."""
        ...

    def rank(self, seq: Sequence) -> tuple[float, int]:
        """The place among all sequences of one that arrives: of those that run, the last is preempted first."""
        ...

    def serve(self, batch: Iterable[Sequence]) -> None:
        """Take note of the tokens that an iteration computes (`Sequence.scheduled`)."""
        ...


class KeyedQueue:
    """Smallest key first; equal keys in order of arrival."""

    def __init__(self, key: Callable[[Sequence], float]) -> None:
        """`key` is asked for once in the life of a sequence, when it arrives."""
        self._key = key
        self._heap = LazyHeap()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._heap)

    def push(self, seq: Sequence) -> None:
        """Let `seq` wait; one that was preempted comes back to its old place."""
        self._heap.push(seq.rank[0], seq)

    def first(self) -> Sequence | None:
        """Who is next; stays in the queue."""
        first = self._heap.first()
        return first[1] if first else None

    def discard(self, seq: Sequence) -> None:
        """Let `seq` wait no longer, if it does."""
        self._heap.discard(seq)

    def rank(self, seq: Sequence) -> tuple[float, int]:
        """Its place among all sequences, by the key."""
        return self._key(seq), seq.arrival

    def serve(self, batch: Iterable[Sequence]) -> None:
        """Nothing: keys are fixed."""


class FairQueue:
    """The tenant that was served least is next: virtual token counters (VTC, Sheng et al., OSDI'24), FCFS within one.

    A counter grows by `input_weight` per prompt token on starting and `output_weight` per later token. A tenant that
    comes with nothing waiting is lifted to the least counter of those that wait, so idleness saves nothing up.
    """

    input_weight, output_weight = 1, 2  # the paper's

    def __init__(self) -> None:
        """Nobody waits, nobody was served."""
        self._counters: Counter[str] = Counter()
        self._queues: dict[str, LazyHeap] = {}  # of tenants with somebody waiting
        self._tenants: list[tuple[int, str]] = []  # heap; counters in it may be older, hence smaller, than the real
        self._listed: set[str] = set()  # tenants in the heap, some perhaps with nobody waiting any more
        self._level = 0  # the least counter of those that wait, or did when last somebody waited
        self._waiting = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._waiting

    def push(self, seq: Sequence) -> None:
        """Let `seq` wait; one that was preempted comes back to its old place in its tenant's queue."""
        tenant = seq.request.tenant
        if tenant not in self._queues:
            self._next_tenant()
            self._counters[tenant] = max(self._counters[tenant], self._level)
            self._queues[tenant] = LazyHeap()
            if tenant not in self._listed:
                self._listed.add(tenant)
                heapq.heappush(self._tenants, (self._counters[tenant], tenant))
            self._forget()
        before = len(self._queues[tenant])
        self._queues[tenant].push(seq.arrival, seq)
        self._waiting += len(self._queues[tenant]) - before

    def first(self) -> Sequence | None:
        """Who is next; stays in the queue."""
        tenant = self._next_tenant()
        first = self._queues[tenant].first() if tenant is not None else None
        return first[1] if first else None

    def discard(self, seq: Sequence) -> None:
        """Let `seq` wait no longer, if it does."""
        queue = self._queues.get(seq.request.tenant)
        if queue is None:
            return
        before = len(queue)
        queue.discard(seq)
        self._waiting += len(queue) - before
        if not queue:
            del self._queues[seq.request.tenant]

    def rank(self, seq: Sequence) -> tuple[float, int]:
        """Its place among all sequences: by arrival, because counters move."""
        return seq.arrival, seq.arrival

    def serve(self, batch: Iterable[Sequence]) -> None:
        """Charge the tenants: for the whole prompt when it is begun, then for every token."""
        for seq in batch:
            request = seq.request
            if not seq.iterations:
                self._counters[request.tenant] += self.input_weight * len(request.prompt_ids)
            elif seq.output_ids:
                self._counters[request.tenant] += self.output_weight

    def _next_tenant(self) -> str | None:
        """The waiting tenant with the least counter; brings the top of the heap up to date."""
        heap = self._tenants
        while heap:
            known, tenant = heap[0]
            if tenant not in self._queues:
                heapq.heappop(heap)
                self._listed.remove(tenant)
            elif known < self._counters[tenant]:
                heapq.heapreplace(heap, (self._counters[tenant], tenant))
            else:
                self._level = known
                return tenant
        return None

    def _forget(self) -> None:
        """Tenants come and go, memory must not grow: the half of the idle ones is forgotten that was served least."""
        if len(self._counters) > 2 * len(self._queues) + 1024:
            idle = sorted((count, tenant) for tenant, count in self._counters.items() if tenant not in self._queues)
            for _, tenant in idle[: len(idle) // 2]:
                del self._counters[tenant]


def make_queue(config: SchedulerConfig, cache: PrefixCache | None) -> Queue:
    """The queue of the order that `config` names; `cached` needs the prefix cache."""
    per_level, per_token, slack = config.priority_seconds, config.token_seconds, config.slack_seconds
    keys: dict[str, Callable[[Sequence], float]] = {
        "fcfs": lambda seq: seq.arrival,
        "priority": lambda seq: seq.arrival_time + per_level * seq.request.priority,
        "shortest": lambda seq: seq.arrival_time + per_token * seq.expected_tokens,
        # Earliest deadline first while deadlines can be met, shortest first where they cannot (the hybrid of QoServe).
        "deadline": lambda seq: (
            (seq.arrival_time + slack if seq.request.deadline is None else seq.request.deadline)
            + per_token * seq.expected_tokens
        ),
        # As shortest, but for the prompt, less what of it can be found in the prefix cache now.
        "cached": lambda seq: seq.arrival_time + per_token * (seq.num_tokens - cache.count(seq) if cache else 0),
    }
    order = config.parts.order
    return FairQueue() if order == "fair" else KeyedQueue(keys[order])
