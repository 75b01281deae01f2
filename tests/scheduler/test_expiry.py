"""Requests that can no longer be served in time end early, with an error that says so."""

from __future__ import annotations

import math

from witness import Witness


def test_the_limit_on_waiting_is_for_those_that_have_not_started() -> None:
    witness = Witness(max_bs=1, max_queue_seconds=5.0)
    witness.submit(1, 2, 10)
    witness.submit(2, 2, 10)
    witness.schedule()
    assert witness.scheduler.next_expiry == 5.0
    assert witness.wait(4.9) == []
    witness.complete()
    (late,) = witness.wait(0.2)
    assert (late.request_id, late.code) == (2, "UNAVAILABLE")
    assert late.message == "Request timeout expired: it was not started within 5 seconds"
    assert witness.scheduler.next_expiry == math.inf
    witness.drain()


def test_it_fires_while_an_iteration_runs() -> None:
    witness = Witness(max_bs=1)
    witness.submit(1, 2, 5, deadline=8.0)
    witness.submit(2, 2, 5, deadline=6.0)
    witness.schedule()
    assert [event.request_id for event in witness.wait(6.0)] == [2]  # waits: at once
    assert witness.scheduler.next_expiry == 8.0
    assert witness.wait(2.0) == []  # in flight: when its iteration returns
    (event,) = witness.complete()
    assert (event.request_id, event.code, event.token_ids) == (1, "UNAVAILABLE", [])
    assert event.message == "Request timeout expired: its deadline cannot be met"


def test_what_is_expected_counts_at_the_pace_of_the_fastest_iteration() -> None:
    """With 9 tokens to come at a second each, 8 seconds are not enough; without a hint one token might do."""
    witness = Witness(max_bs=3)
    witness.submit(1, 2, 20)
    for _ in range(3):
        witness.schedule()
        witness.wait(1.0)
        witness.complete()
    witness.submit(2, 2, 20, expected_tokens=9, deadline=11.0)
    witness.submit(3, 2, 20, deadline=11.0)
    witness.submit(4, 2, 20, min_tokens=9, deadline=11.0)
    assert [event.request_id for event in witness.wait(0.0)] == [2, 4]
    assert witness.scheduler.next_expiry == 10.0
    witness.drain()


def test_the_time_of_a_prompt_is_not_the_pace() -> None:
    """Nothing would correct it: whoever is refused computes nothing."""
    witness = Witness()
    witness.submit(1, 10, 1)
    witness.schedule()
    witness.wait(5.0)
    witness.complete()
    witness.submit(2, 2, 9, expected_tokens=9, deadline=15.0)
    assert witness.wait(0.0) == []
    witness.drain()


def test_one_that_keeps_its_pace_is_let_run() -> None:
    witness = Witness()
    witness.submit(1, 2, 5, expected_tokens=5, deadline=5.5)
    for _ in range(5):
        witness.schedule()
        assert witness.wait(1.0) == []
        (event,) = witness.complete()
    assert event.finish_reason == "length"


def test_a_withheld_answer_of_a_static_batch_is_late_too() -> None:
    witness = Witness("static_fair")
    witness.submit(1, 2, 1, deadline=3.0)
    witness.submit(2, 2, 9)
    witness.step()
    (event,) = witness.wait(4.0)
    assert (event.request_id, event.code) == (1, "UNAVAILABLE")
    witness.drain()
