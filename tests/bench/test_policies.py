"""The comparison of policies: its workload, its numbers by hand, and two policies on a real engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.policies import Ask, Run, Sizes, draw, engine, expectations, make_asks, measure, run, with_stop_token
from orca_backend.channel import IterationReport
from orca_backend.request import TokenEvent
from orca_backend.scheduler.iteration import Occupancy


def test_requests_end_at_the_nearest_token_that_is_new() -> None:
    ask = Ask([1, 2], 16, seed=0)
    generated = [5, 6, 5, 5, 7, 6, 6, 6]
    stops = [with_stop_token(ask, generated, length).stop_token_ids for length in (1, 2, 3, 4, 5, 8)]
    assert stops == [(5,), (6,), (6,), (7,), (7,), (7,)]


def test_the_same_seed_makes_the_same_requests() -> None:
    sizes = Sizes()
    asks = make_asks(sizes, 1000)
    assert asks == make_asks(sizes, 1000)
    lengths = [len(ask.prompt_ids) for ask, _ in asks]
    assert lengths[3::4] == [sizes.long] * (sizes.requests // 4)
    assert max(length for i, length in enumerate(lengths) if i % 4 != 3) <= sizes.short[1]


def report(started: float, num_tokens: int, waiting: int, reserved: int, ended: int = 0) -> IterationReport:
    return IterationReport(
        started=started,
        num_rows=2,
        num_tokens=num_tokens,
        schedule_seconds=1e-4,
        events=[TokenEvent(request_id=1, finish_reason="stop")] * ended,
        occupancy=Occupancy(
            running=2 - ended, waiting=waiting, slots_reserved=reserved, slots_used=10, slots_total=100
        ),
    )


def test_numbers_by_hand() -> None:
    asks = [Ask([1] * 4, 9, seed=0), Ask([1] * 6, 9, seed=0)]
    reports = [report(0.0, 10, 1, 80), report(1.0, 2, 1, 40, ended=1), report(4.0, 5, 0, 20)]
    numbers = measure(Run(asks, [[7, 8, 9], [7, 8]], [[1.0, 2.0, 5.0], [1.0, 2.0]], reports, preemptions=1, wall=8.0))
    assert numbers["requests/s"] == 2 / 8
    assert numbers["generated tokens/s"] == 5 / 8
    assert numbers["first token p50 s"] == 1.0
    assert numbers["running"] == 2.0  # one of them ended in the second iteration
    assert numbers["K/V reserved"] == pytest.approx((1 * 0.8 + 3 * 0.4) / 4)
    assert numbers["K/V used"] == pytest.approx(0.1)
    assert numbers["vain tokens"] == 17 - (4 + 3 - 1) - (6 + 2 - 1)
    assert (numbers["preemptions"], numbers["gap p50 ms"]) == (1, 1000.0)
    whole = measure(Run(asks, [[7, 8, 9], [7, 8]], [[5.0] * 3, [5.0] * 2], reports, preemptions=0, wall=8.0))
    assert "gap p99 ms" not in whole


def test_policies_on_one_engine_give_the_same_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    sizes = Sizes(requests=8, short=(4, 8), long=40, output=(4, 24), limit=40, slots=160, max_bs=8)
    arguments = argparse.Namespace(sizes=sizes, model=tiny_llama, threads=1)
    free = make_asks(sizes, 200)
    runs = {}
    for policy in ("orca", "vllm"):
        with engine(arguments, policy) as process:
            if policy == "orca":
                generated = run(process, [ask for ask, _ in free]).tokens
                asks = [with_stop_token(ask, tokens, n) for (ask, n), tokens in zip(free, generated, strict=True)]
            runs[policy] = run(process, asks)
    assert runs["orca"].tokens == runs["vllm"].tokens
    assert [tokens[-1:] for tokens in runs["orca"].tokens] == [list(ask.stop_token_ids) for ask in asks]
    numbers = {
        policy: {k: {"median": v, "min": v, "max": v} for k, v in measure(of).items()} for policy, of in runs.items()
    }
    assert numbers["orca"]["vain tokens"]["median"] == numbers["orca"]["preemptions"]["median"] == 0
    assert numbers["vllm"]["running"]["median"] > numbers["orca"]["running"]["median"]
    claims = expectations(numbers, {"times faster": 6.0})
    assert [(round(ratio, 1) > 1, so) for _, ratio, so in claims] == [(True, True)] * 2
    result = {"policies": numbers, "quick": True, "model": "m", "threads": 1, "date": "", "machine": {"processor": "p"}}
    draw(json.loads(json.dumps(result)), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
