"""Counting by the serving side: what the engine counts itself survives the engine."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from orca_backend.channel import Heartbeat
from orca_backend.scheduler.iteration import Occupancy
from orca_backend.serving.metrics import Metrics

published: Counter[tuple[str, str]] = Counter()


class Family:
    """Stands where Triton's MetricFamily is, and keeps what it is told."""

    COUNTER, GAUGE = range(2)
    calls = 0

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        key = (self._name, labels.get("le", ""))

        class Handle:
            def increment(self, value: float) -> None:
                assert value > 0
                Family.calls += 1
                published[key] += value  # type: ignore[assignment]

            def set(self, value: float) -> None:
                pass

        return Handle()


def test_counters_of_the_engine_go_on_when_it_is_restarted() -> None:
    """Reports of an engine that died may still be read when the new one is already known to be ready."""
    published.clear()
    metrics = Metrics(Family, {"model": "m"}, print, period=3600)
    for preemptions in (0, 2, 5, 0, 0, 1, 4):
        metrics.engine_reported(Heartbeat(Occupancy(preemptions=preemptions, prefix_hits=16 * preemptions)))
    metrics.close()
    assert published["orca_preemptions_total", ""] == published["vllm:num_preemptions_total", ""] == 9
    assert published["vllm:prefix_cache_hits_total", ""] == 9 * 16


def test_a_failure_to_publish_does_not_end_it() -> None:
    published.clear()
    said: list[str] = []
    metrics = Metrics(Family, {"model": "m"}, said.append, period=0.01)
    handle = metrics._handles["orca_expired_total", ""]
    failures = iter([RuntimeError("no shared memory"), RuntimeError("still none")])

    class Hindered:
        def increment(self, value: float) -> None:
            if error := next(failures, None):
                raise error
            handle.increment(value)

    metrics._handles["orca_expired_total", ""] = Hindered()
    deadline = time.monotonic() + 20
    while not published["orca_expired_total", ""]:
        assert time.monotonic() < deadline
        metrics.expired()
        time.sleep(0.02)
    metrics.close()
    assert said == ["metrics cannot be published: RuntimeError: no shared memory"]


def test_the_calls_into_the_server_do_not_grow_with_the_tokens() -> None:
    published.clear()
    Family.calls = 0
    metrics = Metrics(Family, {"model": "m"}, print, period=3600)
    for i in range(50_000):
        metrics.tokens_came(2, now=100.0 + i % 7 / 10, previous=100.0 if i % 50 else None, arrived=99.0)
    metrics.close()
    assert published["vllm:generation_tokens_total", ""] == 100_000
    assert published["vllm:time_to_first_token_seconds_count", ""] == 1000
    assert published["vllm:time_per_output_token_seconds_count", ""] == 2 * 49_000
    assert Family.calls < 50
