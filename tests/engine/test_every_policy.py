"""Every policy on the real model: whoever is scheduled when, in whatever pieces, gets the same tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.model import Model, open_model
from orca_backend.config import POLICIES, SchedulerConfig
from orca_backend.request import Request, SamplerSettings
from orca_backend.scheduler.iteration import Occupancy
from orca_backend.scheduler.policies import make_scheduler

SLOTS = 1024
IDS = itertools.count(1)  # over all tests: the runner remembers the last ones of the test before


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return open_model(
        model=str(smollm2),
        threads=1,
        scheduler={"policy": "vllm", "preemption": "swap"},
        kv_cache={"n_slots": SLOTS, "swap_memory": "32MiB"},
    )


def requests(count: int, stem: int = 0) -> Iterator[Request]:
    """Greedy ones and seeded ones with penalties; the first `stem` tokens are common to all."""
    generator = random.Random(7)
    common = [generator.randrange(1000, 40000) for _ in range(stem)]
    for i in range(count):
        prompt = common + [generator.randrange(1000, 40000) for _ in range(generator.randint(1, 60 - stem // 2))]
        sampling = SamplerSettings()
        if i % 3 == 2:
            sampling = SamplerSettings(
                temperature=1.0, seed=i, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=8
            )
        yield Request(
            request_id=next(IDS),
            prompt_ids=prompt,
            max_new_tokens=generator.randint(8, 20),
            stop_token_ids=[2] if i % 3 == 2 else [],
            sampling=sampling,
            priority=i % 2,
            tenant="" if stem else str(i % 2),
        )


def run(
    model: Model,
    asked: Iterator[Request],
    *,
    n_slots: int = SLOTS,
    prefix_cache: bool = False,
    swap_slots: int = 0,
    **options: Any,
) -> tuple[list[list[int]], Occupancy]:
    """The tokens of every request, in order, two of them arriving in every iteration; and the final counts."""
    scheduler = make_scheduler(
        SchedulerConfig(**options),
        n_slots=n_slots,
        block_size=model.info.block_size,
        max_model_len=96,
        prefix_cache=prefix_cache,
        swap_slots=swap_slots,
    )
    answers: dict[int, list[int]] = {}
    while True:
        for request in itertools.islice(asked, 2):
            scheduler.submit(request)
            answers[request.request_id] = []
        batch = scheduler.schedule()
        if batch is None:
            assert not scheduler.has_work
            return list(answers.values()), scheduler.occupancy()
        for event in scheduler.update(model.runner.run(batch)):
            assert not event.message
            answers[event.request_id] += event.token_ids


@pytest.fixture(scope="module")
def alone(model: Model) -> list[list[int]]:
    return run(model, requests(10), max_bs=1)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_same_tokens_under_every_policy(model: Model, alone: list[list[int]], policy: str) -> None:
    """208 slots do not hold what 8 requests at once grow to, so those that do not reserve must preempt."""
    options = {"token_budget": 24} if policy == "sarathi" else {}
    answers, occupancy = run(model, requests(10), n_slots=208, policy=policy, max_bs=8, watermark=0, **options)
    assert answers == alone
    assert (occupancy.preemptions > 0) == (policy in ("vllm", "sarathi"))


@pytest.mark.parametrize("swap_slots", [80, SLOTS])
@pytest.mark.parametrize("policy", ["vllm", "sarathi"])
def test_same_tokens_after_swapping(model: Model, alone: list[list[int]], policy: str, swap_slots: int) -> None:
    """Host memory may also be full, and then those that do not fit are computed again."""
    answers, occupancy = run(
        model,
        requests(10),
        n_slots=208,
        swap_slots=swap_slots,
        policy=policy,
        preemption="swap",
        order="priority",
        max_bs=8,
        watermark=0,
    )
    assert answers == alone
    assert occupancy.preemptions > 0


def requests_with_a_stem() -> Iterator[Request]:
    """Six that share their first 48 tokens, then six whose whole prompt consists of full blocks seen before."""
    yield from requests(6, stem=48)
    for request in requests(6, stem=48):
        whole = request.prompt_ids[: len(request.prompt_ids) // 16 * 16]
        yield Request(request_id=next(IDS), prompt_ids=whole, max_new_tokens=6)


@pytest.fixture(scope="module")
def with_a_stem_alone(model: Model) -> list[list[int]]:
    return run(model, requests_with_a_stem(), max_bs=1)[0]


@pytest.mark.parametrize("policy", ["orca", "peak", "vllm", "sarathi"])
def test_same_tokens_from_cached_prefixes(model: Model, with_a_stem_alone: list[list[int]], policy: str) -> None:
    """Also where a whole prompt is found, so that its last block is copied before its last token is computed again."""
    answers, occupancy = run(model, requests_with_a_stem(), n_slots=208, prefix_cache=True, policy=policy, max_bs=4)
    assert answers == with_a_stem_alone
    assert 11 * 32 <= occupancy.prefix_hits < occupancy.prefix_queries
