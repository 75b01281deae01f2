"""Who is next: every order by cases with a known answer, and what bounds the waiting under it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from witness import Witness

from orca_backend.config import SchedulerConfig
from orca_backend.request import Request, Sequence
from orca_backend.scheduler.lazy_heap import LazyHeap
from orca_backend.scheduler.order import FairQueue, make_queue


def started(witness: Witness) -> list[int]:
    """Requests in the order in which they started."""
    witness.drain()
    return list(dict.fromkeys(i for batch in witness.batches for i in batch))


def test_priority_lower_first_then_arrival() -> None:
    witness = Witness(order="priority", max_bs=1)
    for request_id, priority in enumerate([0, 1, -1, 0, -1]):
        witness.submit(request_id, 2, 2, priority=priority)
    assert started(witness) == [2, 4, 0, 3, 1]


@pytest.mark.parametrize(("seconds", "first"), [(19.0, 2), (21.0, 1)])
def test_priority_ages(seconds: float, first: int) -> None:
    """Two levels are worth 20 seconds of waiting, so a request waits behind later ones for no longer than that."""
    witness = Witness(order="priority", max_bs=1, priority_seconds=10.0)
    witness.submit(1, 2, 2, priority=2)
    witness.wait(seconds)
    witness.submit(2, 2, 2, priority=0)
    assert started(witness)[0] == first


def test_shortest_by_hint_or_limit_and_ageing() -> None:
    witness = Witness(order="shortest", max_bs=1, token_seconds=0.1)
    witness.submit(1, 2, 50)
    witness.submit(2, 2, 20)
    witness.submit(3, 2, 60, expected_tokens=5)
    witness.wait(10.0)
    witness.submit(4, 2, 1)
    assert started(witness) == [3, 2, 1, 4]


def test_earliest_deadline_first_but_a_long_one_gives_way() -> None:
    witness = Witness(order="deadline", max_bs=1, token_seconds=0.1, slack_seconds=60.0)
    witness.submit(1, 2, 9, deadline=50.0)
    witness.submit(2, 2, 9, deadline=40.0)
    witness.submit(3, 2, 500, deadline=35.0)
    witness.submit(4, 2, 9)
    assert started(witness) == [2, 1, 4, 3]


def test_cached_prompts_first() -> None:
    witness = Witness(order="cached", max_bs=1, block_size=4, prefix_cache=True, n_slots=400)
    witness.submit(1, 21, 2, shared=20)
    witness.drain()
    witness.submit(2, 21, 2)
    witness.submit(3, 30, 2, shared=20)
    assert started(witness)[1:] == [3, 2]


def test_a_preempted_request_comes_back_to_its_place() -> None:
    """Under pressure the one that is first never loses its blocks, whoever started before it."""
    witness = Witness("vllm", order="priority", max_bs=3, n_slots=12, watermark=0)
    witness.submit(1, 4, 6, priority=1)
    witness.step()
    witness.submit(2, 4, 6, priority=0)
    while 2 in witness.pool:
        witness.step()
    assert witness.preemptions > 0
    assert 1 in witness.pool
    witness.drain()


def test_fair_shares_of_backlogged_tenants_differ_by_no_more_than_the_bound() -> None:
    """VTC: at most twice what the tokens of a full pool, or one prompt, weigh (OSDI'24, theorem 4.4)."""
    generator = random.Random(1)
    witness = Witness(order="fair", max_bs=4, n_slots=80, max_model_len=40)
    tenants = {}
    for i in range(240):  # one asks for much, and asked first; the other for little at a time
        tenants[i] = "greedy" if i < 120 else "modest"
        longest = 20 if i < 120 else 5
        prompt, generate = generator.randint(1, longest), generator.randint(1, longest)
        witness.submit(i, prompt, generate, tenant=tenants[i])
    service: Counter[str] = Counter()
    begun: set[int] = set()
    while {tenants[i] for i, account in witness.pool.items() if not account.started} == {"greedy", "modest"}:
        while witness.schedule():
            pass
        for i in witness.batches[-1]:
            service[tenants[i]] += 2 if i in begun else len(witness.pool[i].request.prompt_ids)
            begun.add(i)
        witness.complete()
        assert abs(service["greedy"] - service["modest"]) <= 2 * max(20, 2 * 80)
    assert sum(service.values()) > 1000
    witness.drain()


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    witness = Witness(order="fair", max_bs=1)
    for i in range(20):
        witness.submit(i, 10, 1, tenant="busy")
    for _ in range(10):
        witness.step()
    for i in range(20, 30):
        witness.submit(i, 10, 1, tenant="new")
    order = [i for i in started(witness) if i >= 10]
    assert all(abs(sum(i < 20 for i in order[:n]) - sum(i >= 20 for i in order[:n])) <= 2 for n in range(1, 20))


def test_tenants_that_come_and_go_leave_no_memory() -> None:
    queue = make_queue(SchedulerConfig(order="fair"), None)
    assert isinstance(queue, FairQueue)
    for i in range(10_000):
        seq = Sequence(Request(request_id=i, prompt_ids=[1], max_new_tokens=1, tenant=str(i)), arrival=i)
        queue.push(seq)
        assert queue.first() is seq
        queue.discard(seq)
        queue.serve([seq])
    assert len(queue) == 0
    assert max(len(queue._counters), len(queue._tenants), len(queue._listed)) < 3000


def test_what_is_taken_out_of_the_middle_leaves_no_memory() -> None:
    heap = LazyHeap()
    first = Sequence(Request(request_id=0, prompt_ids=[1], max_new_tokens=1), arrival=0)
    heap.push(0, first)
    for i in range(1, 10_000):
        seq = Sequence(first.request, arrival=i)
        heap.push(i, seq)
        heap.push(i + 0.5, seq)  # moved
        heap.discard(seq)
    assert len(heap) == 1
    assert len(heap._heap) < 50
    assert heap.first() == (0, first)
