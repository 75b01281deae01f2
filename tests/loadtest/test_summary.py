from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load import Outcome, Record, Session, Turn
from loadtest.perf_analyzer import rates, read_export
from loadtest.summary import Slo, completion_rate, summarize


def answered(scheduled: float, times: list[float], tokens: list[int] | None = None, **more: float) -> Record:
    tokens = tokens or [1] * len(times)
    return Record(scheduled=scheduled, sent=scheduled, times=times, tokens=tokens, ended=times[-1], **more)


def outcome(*records: Record, cpu: float = 0.0) -> Outcome:
    return Outcome(started=0.0, wall=max(record.ended for record in records), cpu=cpu, records=list(records))


def test_numbers_by_hand() -> None:
    found = summarize(
        outcome(answered(1.0, [2.0, 2.1, 2.5], [1, 1, 2]), answered(3.0, [3.2]), answered(4.0, [4.5, 5.0]))
    )
    assert found.requests == 3
    assert found.offered == pytest.approx(2 / 3)
    assert found.latency("ttft").mean == pytest.approx((1.0 + 0.2 + 0.5) / 3)
    assert found.latency("itl").max == pytest.approx(0.5)
    assert found.latency("itl").count == 3
    assert found.latency("tpot").mean == pytest.approx((0.5 / 3 + 0.5) / 2)  # not the answer of one token
    assert found.latency("normalized").median == pytest.approx(1.5 / 4)
    assert found.latency("e2e").max == pytest.approx(1.5)
    assert found.throughput == pytest.approx(2 / (5.0 - 2.5))  # of the first and the last
    assert found.tokens_per_second == pytest.approx(found.throughput * 7 / 3)
    assert not found.failures


def test_the_warm_up_is_left_out() -> None:
    found = summarize(outcome(answered(0.0, [9.0]), answered(5.0, [5.5]), answered(6.0, [6.5])), warmup=1.0)
    assert found.requests == 2
    assert found.latency("e2e").max == pytest.approx(0.5)
    with pytest.raises(ValueError, match="after the warm-up of 7 s"):
        summarize(outcome(answered(0.0, [9.0])), warmup=7.0)


@given(st.integers(1, 20), st.integers(1, 16), st.floats(0.1, 10))
def test_throughput_is_right_for_answers_in_bursts(pairs: int, burst: int, period: float) -> None:
    times = [period * number for number in range(2 * pairs) for _ in range(burst)]
    assert completion_rate(times) == pytest.approx(burst / period)


@given(st.integers(2, 60), st.floats(0.1, 10))
def test_throughput_of_an_even_stream(count: int, rate: float) -> None:
    assert completion_rate([number / rate for number in range(count)]) == pytest.approx(rate)


def test_throughput_of_next_to_nothing() -> None:
    assert completion_rate([]) == completion_rate([3.0]) == completion_rate([3.0, 3.0]) == 0


def test_an_slo_counts_every_request_and_failures_as_never_answered() -> None:
    good = [answered(float(i), [i + 0.1, i + 0.2]) for i in range(98)]
    slow = answered(98.0, [99.5, 99.6])
    failed = Record(scheduled=99.0, sent=99.0, ended=99.1, error="Unavailable: full")
    slo = Slo(ttft=0.5, tpot=0.2)
    assert summarize(outcome(*good, slow), slo=slo).meets_slo is False  # 98 of 99 are not 99 %
    assert summarize(outcome(*good, answered(98.0, [98.1]), slow), slo=slo).meets_slo is True
    found = summarize(outcome(*good, answered(98.0, [98.1]), failed), slo=slo)
    assert found.meets_slo is True
    assert found.attainment == pytest.approx(0.99)
    assert found.goodput == pytest.approx(found.throughput)
    assert found.failures == {"Unavailable: full": 1}
    assert summarize(outcome(*good, slow, failed), slo=slo).meets_slo is False
    assert str(Slo(ttft=2.0)) == "TTFT 2000 ms for 99 % of requests"
    assert Slo().met_by(good[0])
    assert not Slo().met_by(failed)


def test_a_generator_that_is_the_bottleneck_is_named() -> None:
    late = answered(1.0, [3.0], [1])
    late.sent = 2.0
    (warning,) = summarize(outcome(late)).warnings
    assert "sent late (p99 1000 ms, median TTFT 2000 ms)" in warning
    (warning,) = summarize(outcome(answered(1.0, [2.0]), cpu=1.9)).warnings
    assert "busy 95% of the time" in warning
    assert not summarize(outcome(answered(1.0, [2.0]), cpu=0.5)).warnings


def test_nothing_that_ended_well() -> None:
    failed = Record(scheduled=0.0, ended=1.0, error="Internal: no")
    found = summarize(Outcome(started=0.0, wall=1.0, cpu=0.0, records=[failed]))
    assert found.throughput == found.goodput == found.tokens_per_second == 0
    assert math.isnan(found.latency("ttft").mean)
    assert found.meets_slo is False  # there are no limits, but what never comes keeps none


def test_a_profile_of_perf_analyzer() -> None:
    second = 10**9
    requests = [
        {"timestamp": 12 * second, "response_timestamps": [13 * second, 15 * second]},
        {"timestamp": 10 * second, "response_timestamps": [11 * second, 12 * second]},
        {"timestamp": 15 * second, "response_timestamps": [16 * second]},
    ]
    sessions = [Session([Turn("a", 3, 2)]), Session([Turn("b", 4, 2)]), Session([Turn("c", 5, 1)])]
    found = read_export({"experiments": [{"requests": requests}]}, sessions)
    assert [record.sent for record in found.records] == pytest.approx([0, 2, 5])
    assert [record.prompt_tokens for record in found.records] == [3, 4, 5]
    assert rates(found) == pytest.approx((3 / 6, 2.0))
