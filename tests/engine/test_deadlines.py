"""Deadlines in the real engine, which runs while they pass."""

from __future__ import annotations

import time
from pathlib import Path

from bench.engine_process import Answer, EngineProcess
from orca_backend.channel import Submit
from orca_backend.config import EngineConfig, KVCacheConfig, SchedulerConfig
from orca_backend.request import Request

EXPIRED = "Request timeout expired: its deadline cannot be met"


def test_deadlines_that_pass_while_tokens_come_end_each_request_once(tiny_llama: Path) -> None:
    """The error once came before the tokens of the iteration that had just returned: news after the end."""
    config = EngineConfig(
        model=str(tiny_llama),
        dtype="float32",
        threads=1,
        scheduler=SchedulerConfig(max_bs=16),
        kv_cache=KVCacheConfig(n_slots=8192),
    )
    for apart in (0.003, 0.001, 0.0003, 0.0001, 0.01, 0.03):  # seconds between deadlines: as this machine is fast
        with EngineProcess(config) as engine:
            began = time.monotonic()
            for i in range(1, 401):
                deadline = began + 0.2 + i * apart
                request = Request(request_id=i, prompt_ids=[5, 6, 7], max_new_tokens=100, deadline=deadline)
                engine.answers[i] = Answer(request)
                engine.channel.send(Submit(request))
            patient = engine.submit([5], 10)
            answers = engine.finish()  # notices news after an end
        assert engine.answers[patient].finish_reason == "length"
        late = [answer for answer in answers if answer.finish_reason == "error"]
        assert {(answer.code, answer.message) for answer in late} <= {("UNAVAILABLE", EXPIRED)}
        if any(answer.token_ids for answer in late):
            break
    else:
        raise AssertionError("no deadline passed while tokens came")
    assert engine.occupancy.slots_reserved == 0
