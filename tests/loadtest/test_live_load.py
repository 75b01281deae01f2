"""The load generator, and what is measured with it, on a real server."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from loadtest import perf_analyzer
from loadtest.capacity import CapacityTest, Rules, bisect, compare
from loadtest.generator import generate
from loadtest.load import Load, Record
from loadtest.measurement import Target, measure
from loadtest.server_metrics import Metrics
from loadtest.summary import Slo
from loadtest.workload import Arrivals, Workload

CLOSED = Arrivals(kind="closed")
STALL_S = 2.0


def in_flight(records: list[Record], time: float) -> int:
    return sum(record.sent <= time < record.ended for record in records)


def test_a_closed_loop_keeps_so_many_in_flight(target: Target) -> None:
    sessions = Workload("uniform:5-60,2-12", target.checkpoint).sessions(24, CLOSED)
    measured = measure(target, sessions, streams=3)
    records = measured.outcome.records
    assert sorted(record.session for record in records) == list(range(24))
    assert not any(record.error for record in records)
    for record in records:
        (turn,) = sessions[record.session].turns
        assert (record.prompt_tokens, record.num_tokens) == (turn.prompt_tokens, turn.max_tokens)  # the server counted
        assert record.scheduled == pytest.approx(record.sent, abs=1)
    assert max(in_flight(records, record.sent) for record in records) == 3
    assert measured.moments  # the server's own view
    assert measured.moments[0].slots_total > 0
    assert measured.moments[0].memory > 50e6


def test_a_closed_loop_with_an_end_begins_its_list_again(target: Target) -> None:
    sessions = Workload("homogeneous:8,2", target.checkpoint).sessions(2, CLOSED)
    outcome = generate(Load(url=target.url, sessions=sessions, streams=2, until=2))
    assert len(outcome.records) > 2
    assert max(record.sent for record in outcome.records) < 2 <= outcome.wall


def test_chats_carry_their_history(target: Target) -> None:
    """The tiny model has no chat template, and says so."""
    sessions = Workload("chat:3,10,5,0", target.checkpoint).sessions(2, CLOSED)
    outcome = generate(Load(url=target.url, sessions=sessions, streams=2))
    assert len(outcome.records) == 2  # a failure ends the conversation
    assert all("no chat template" in record.error for record in outcome.records)


def test_a_stall_of_the_server_is_seen_by_all_that_it_kept_waiting(target: Target, engine: psutil.Process) -> None:
    """No coordinated omission: requests that were due during the stall count from then, though nothing came back."""
    rate = 20.0
    sessions = Workload("homogeneous:16,4", target.checkpoint).sessions(100, Arrivals(rate=rate))

    def finished() -> float:
        return Metrics.read(str(target.metrics_url)).total("orca_finished_total")

    def stall() -> None:
        while finished() == before:  # until the load has begun; it goes on for 5 s
            time.sleep(0.1)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            time.sleep(STALL_S)
        finally:
            os.kill(engine.pid, signal.SIGCONT)

    before = finished()
    thread = threading.Thread(target=stall)
    thread.start()
    try:
        measured = measure(target, sessions)
    finally:
        thread.join()
    records, summary = measured.outcome.records, measured.summary
    assert not summary.failures
    longest = max(b - a for record in records for a, b in itertools.pairwise(sorted([record.sent, *record.times])))
    assert longest > 0.8 * STALL_S
    assert summary.latency("ttft").max > 0.8 * STALL_S
    # Of the 40 or so that were due meanwhile the first half waited more than a second, and the p90 shows it.
    waited = [record for record in records if record.times[0] - record.scheduled > STALL_S / 2]
    assert len(waited) > 0.25 * rate * STALL_S
    assert summary.latency("ttft").percentiles[90] > STALL_S / 2
    # A loop that waits for answers, as many tools do, would have sent next to nothing, and seen one slow answer.
    assert summary.latency("lateness").percentiles[90] < STALL_S / 4


def test_failures_are_counted_by_their_reason(target: Target) -> None:
    sessions = Workload("homogeneous:8,2", target.checkpoint).sessions(2, CLOSED)
    too_long = Workload("homogeneous:200,200", target.checkpoint).sessions(1, CLOSED)
    measured = measure(target, [*sessions, *too_long], streams=3)
    ((reason, count),) = measured.summary.failures.items()
    assert count == 1
    assert reason.startswith(("InvalidArgument: ", "200 prompt", "56 tokens instead of 200"))
    assert measured.summary.requests == 3


def test_nobody_there() -> None:
    sessions = [*Workload("homogeneous:8,2", Path("models/smollm2-135m-instruct")).sessions(1, CLOSED)]
    outcome = generate(Load(url="127.0.0.1:9", sessions=sessions))
    assert outcome.records[0].error.startswith("Unavailable: ")


@pytest.mark.parametrize("true", [0.07, 1.0, 6.3, 19.0, 44.0, 1000.0])
def test_bisection_finds_the_rate_wherever_it_begins(true: float) -> None:
    tried: list[float] = []

    def passes(rate: float) -> bool:
        tried.append(rate)
        return rate <= true

    found = bisect(passes, 10.0, 20.0, 0.05)
    assert found <= true <= found * 1.051
    assert len(tried) == len(set(tried))  # what is known is not asked again
    assert len(tried) < 20
    assert bisect(lambda rate: False, 10.0, 20.0, 0.05) == 0


def test_capacity_of_a_real_server_against_itself(target: Target) -> None:
    """Coarse and short: that rates below it keep the SLO, and above it do not, is what makes it a capacity."""
    workload = Workload("uniform:8-32,2-8", target.checkpoint)
    rules = Rules(Slo(ttft=0.5), min_seconds=0.2, min_requests=10, tolerance=2.0, max_streams=8)
    said: list[str] = []
    tests = [CapacityTest(target, workload, rules, said.append, seed=seed) for seed in (0, 1)]
    of_a, of_b, ratios = compare(*tests, rounds=1)
    for search in (*of_a, *of_b):
        assert search.rate > 0
        assert search.best is not None
        assert search.best.summary.meets_slo
        assert all(summary.requests >= rules.min_requests - 1 for _, summary, _ in search.probes)
    assert ratios == [of_b[0].rate / of_a[0].rate]
    assert any("requests/s: passed" in text for text in said)


def test_perf_analyzer_sends_the_same_and_is_understood(target: Target) -> None:
    sessions = Workload("uniform:8-32,3-9", target.checkpoint).sessions(24, CLOSED)
    outcome = perf_analyzer.run(target, sessions, streams=3)
    assert len(outcome.records) >= 24
    rate, latency = perf_analyzer.rates(outcome)
    assert rate * latency == pytest.approx(3, rel=0.5)  # Little's law: three at any time
    responses = [len(record.times) for record in outcome.records]
    assert 1 < max(responses) <= 9
    assert not any(record.error for record in outcome.records)
