"""Scheduling ahead of the tokens: the same answers as without, whatever stops, fails or is cancelled when."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_backend.config import SchedulerConfig
from orca_backend.engine.lookahead import Lookahead
from orca_backend.engine.sequence_table import PENDING
from orca_backend.request import Request, TokenEvent
from orca_backend.scheduler.iteration import IterationBatch, IterationResult
from orca_backend.scheduler.policies import make_scheduler
from orca_backend.scheduler.scheduler import Scheduler

STOP = 0


class Device:
    """Computes iterations in order, with tokens of a rule; what the host calls PENDING it knows itself."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.owner: dict[int, int] = {}  # K/V block: who wrote it last
        self.blocks: dict[int, list[int]] = {}
        self.wasted = 0

    def run(self, batch: IterationBatch) -> IterationResult:
        for sequence in batch.joining:
            self.blocks[sequence.request_id] = sequence.block_ids
        sampled, first = [], 0
        for row in batch.rows:
            ids = [self.last[row.request_id] if i == PENDING else i for i in batch.token_ids[first:][: row.num_tokens]]
            first += row.num_tokens
            block = self.blocks[row.request_id][row.start // 4]
            if row.start % 4:
                assert self.owner[block] == row.request_id  # nobody has written where this one reads
            for position in range(row.start, row.start + row.num_tokens):
                self.owner[self.blocks[row.request_id][position // 4]] = row.request_id
            token = random.Random(f"{row.request_id} {row.start + row.num_tokens} {ids[-1]}").choice([STOP, 5, 6, 7, 8])
            self.last[row.request_id] = token
            sampled.append(token if row.sample else -1)
        return IterationResult(iteration_id=batch.iteration_id, sampled=sampled)


def make(max_bs: int = 4, n_slots: int = 64, **options: object) -> Scheduler:
    config = SchedulerConfig(max_bs=max_bs, **options)
    return make_scheduler(config, n_slots=n_slots, block_size=4, max_model_len=40)


def serve(scheduler: Scheduler | Lookahead, requests: list[Request], cancelled: dict[int, int]) -> dict[int, list]:
    """Events by request; `cancelled`: request id to the number of its events after which it is cancelled."""
    device, events, waiting = Device(), {request.request_id: [] for request in requests}, deque(requests)
    in_flight: deque[IterationResult] = deque()
    while waiting or scheduler.has_work:
        if waiting:
            scheduler.submit(waiting.popleft())
        while (batch := scheduler.schedule()) is not None:
            in_flight.append(device.run(batch))
        new: list[TokenEvent] = scheduler.update(in_flight.popleft()) if in_flight else []
        for event in new:
            events[event.request_id].append(event)
            if cancelled.get(event.request_id) == len(events[event.request_id]):
                for last in scheduler.cancel(event.request_id):
                    events[last.request_id].append(last)
    return events


@given(seed=st.integers(0, 10_000), max_bs=st.sampled_from([1, 3, 8]))
@settings(max_examples=150, deadline=None)
def test_the_answers_are_those_without_looking_ahead(seed, max_bs):
    generator = random.Random(seed)
    requests = [
        Request(
            request_id=i,
            prompt_ids=[1] * generator.randint(1, 12),
            max_new_tokens=generator.randint(1, 12),
            stop_token_ids=[STOP] if generator.random() < 0.7 else [],
        )
        for i in range(15)
    ]
    cancelled = {i: generator.randint(1, 6) for i in range(0, 15, 4)}
    expected = serve(make(max_bs), requests, cancelled)
    lookahead = Lookahead(make(max_bs))
    actual = serve(lookahead, requests, cancelled)
    for i, events in actual.items():
        tokens = [token for event in events for token in event.token_ids]
        assert PENDING not in tokens
        assert tokens == [token for event in expected[i] for token in event.token_ids]
        assert [event.finish_reason for event in events] == [event.finish_reason for event in expected[i]]
    assert lookahead.occupancy().slots_reserved == 0
    assert not lookahead._ended


def test_a_stop_wastes_one_row_and_a_known_length_none():
    lookahead = Lookahead(make())
    lookahead.submit(Request(request_id=1, prompt_ids=[1], max_new_tokens=9, stop_token_ids=[STOP]))
    lookahead.submit(Request(request_id=2, prompt_ids=[1], max_new_tokens=2))
    first, second = lookahead.schedule(), lookahead.schedule()
    assert second.token_ids == [PENDING, PENDING]
    assert lookahead.schedule() is None  # two in flight
    events = lookahead.update(IterationResult(iteration_id=first.iteration_id, sampled=[STOP, 5]))
    assert [(event.token_ids, event.finish_reason) for event in events] == [([STOP], "stop"), ([5], None)]
    assert lookahead.schedule() is None  # 1 has stopped; 2 has all it asked for in flight
    events = lookahead.update(IterationResult(iteration_id=second.iteration_id, sampled=[7, 6]))
    assert [(event.request_id, event.token_ids, event.finish_reason) for event in events] == [(2, [6], "length")]
    assert not lookahead.has_work


def test_what_fails_ends_once():
    lookahead = Lookahead(make())
    for i in range(3):
        lookahead.submit(Request(request_id=i, prompt_ids=[1], max_new_tokens=9))
    first, second = lookahead.schedule(), lookahead.schedule()
    result = IterationResult(iteration_id=first.iteration_id, sampled=[5, -1, 5], failed={1: "NaN"})
    events = lookahead.update(result)
    assert [(event.request_id, event.code, event.message) for event in events if event.finish_reason] == [
        (1, "INTERNAL", "NaN")
    ]
    assert [event.request_id for event in lookahead.cancel(2)] == [2]
    events = lookahead.fail_iteration(second.iteration_id, "lost")
    assert [(event.request_id, event.message) for event in events] == [(0, "lost")]
    assert not lookahead.has_work
    assert lookahead.occupancy().slots_reserved == 0
    with pytest.raises(KeyError):
        lookahead.update(result)


@pytest.mark.parametrize("options", [{"policy": "vllm"}, {"policy": "static_fair"}, {"n_workers": 2}])
def test_policies_that_look_at_tokens_are_refused(options):
    with pytest.raises(ValueError, match="needs the tokens"):
        Lookahead(make(**options))
