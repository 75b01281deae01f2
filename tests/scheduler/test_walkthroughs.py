"""Schedules worked out by hand from the paper's figures, and single cases with a known answer."""

from __future__ import annotations

import pytest
from witness import Witness

from orca_backend.request import Request, TokenEvent
from orca_backend.scheduler.iteration import IterationResult, Row
from orca_backend.scheduler.scheduler import Rejected

A, B, C, D, E, F = range(1, 7)


def ends(events: list[TokenEvent]) -> dict[int, str | None]:
    """Finish reasons of those that ended, by request."""
    return {event.request_id: event.finish_reason for event in events if event.finish_reason}


@pytest.mark.parametrize(
    ("n_workers", "order"),
    [
        (1, [[A, B], [A, B], [A, B], [C, D], [C, D], [C, D], [E, F], [E, F], [E, F]]),
        (2, [[A, B], [C, D], [A, B], [C, D], [A, B], [C, D], [E, F], [E, F], [E, F]]),
        (3, [[A, B], [C, D], [E, F], [A, B], [C, D], [E, F], [A, B], [C, D], [E, F]]),
    ],
)
def test_figure_8_pipelined_iterations(n_workers: int, order: list[list[int]]) -> None:
    witness = Witness(max_bs=2, n_workers=n_workers)
    for request_id in (A, B, C, D, E, F):
        witness.submit(request_id, prompt=4, generate=3)
    witness.drain()
    assert witness.batches == order


def test_figure_3_early_finished_and_late_joining() -> None:
    """x1 needs 4 iterations and x2 needs 2; x3 arrives during the first and needs 1."""
    orca, static = Witness("orca", max_bs=2), Witness("static_fair", max_bs=2)
    told: dict[str, list[dict[int, str | None]]] = {}
    for name, witness in {"orca": orca, "static": static}.items():
        witness.submit(1, prompt=2, generate=4)
        witness.submit(2, prompt=3, generate=2)
        witness.schedule()
        witness.submit(3, prompt=1, generate=1)
        told[name] = [ends(witness.complete())]
        while witness.scheduler.has_work:
            told[name].append(ends(witness.step()))
    assert orca.batches == [[1, 2], [1, 2], [1, 3], [1]]
    assert told["orca"] == [{}, {2: "length"}, {3: "length"}, {1: "length"}]
    assert static.batches == [[1, 2], [1, 2], [1, 2], [1, 2], [3]]
    assert told["static"] == [{}, {}, {}, {1: "length", 2: "length"}, {3: "length"}]


def test_figure_3_rows_of_a_member_that_has_ended() -> None:
    """They repeat its last computed token at its place, sample nothing, and the answer comes whole at the end."""
    witness = Witness("static_fair", max_bs=2)
    witness.submit(1, prompt=2, generate=4)
    witness.submit(2, prompt=3, generate=2)
    for _ in range(2):
        witness.step()
    batch = witness.schedule()
    assert batch is not None
    assert batch.rows == [Row(1, 3, 1), Row(2, 3, 1, sample=False)]
    assert batch.token_ids == [7, 7]
    assert witness.complete() == []
    events = witness.step()
    assert [(event.request_id, event.token_ids) for event in events] == [(2, [7, 7]), (1, [7, 7, 7, 7])]
    assert witness.scheduler.occupancy().slots_reserved == 0


def test_figures_4_and_5_mixed_phases_in_one_iteration() -> None:
    """x1 and x2 are in their increment phase when x3 (2 tokens) and x4 (3 tokens) arrive: 7 tokens, 4 rows."""
    witness = Witness(max_bs=4)
    witness.submit(1, prompt=2, generate=10)
    witness.step()
    witness.submit(2, prompt=1, generate=10)
    witness.step()
    witness.submit(3, prompt=2, generate=10)
    witness.submit(4, prompt=3, generate=10)
    batch = witness.schedule()
    assert batch is not None
    assert batch.rows == [Row(1, 3, 1), Row(2, 1, 1), Row(3, 0, 2), Row(4, 0, 3)]
    assert batch.token_ids == [7, 7, 3000, 3001, 4000, 4001, 4002]
    assert [joiner.request_id for joiner in batch.joining] == [3, 4]
    assert [event.token_ids for event in witness.complete([15, 22, 33, 44])] == [[15], [22], [33], [44]]


def test_a_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    witness = Witness(max_bs=4, n_slots=10)
    witness.submit(1, prompt=4, generate=2)
    witness.submit(2, prompt=4, generate=1)
    witness.submit(3, prompt=1, generate=1)
    assert witness.scheduler.occupancy().slots_reserved == 0
    witness.step()
    assert witness.scheduler.occupancy().slots_reserved == 6
    witness.drain()
    assert witness.batches == [[1], [1], [2, 3]]


def test_reservation_is_in_whole_blocks() -> None:
    witness = Witness(n_slots=48, block_size=16, max_bs=4)
    witness.submit(1, prompt=10, generate=7)  # 17 tokens: two blocks
    witness.submit(2, prompt=8, generate=8)  # one block
    witness.submit(3, prompt=1, generate=1)
    witness.schedule()
    assert witness.batches == [[1, 2]]
    assert witness.scheduler.occupancy().slots_reserved == 48


def test_static_takes_the_first_that_fit_and_stops_at_the_first_misfit() -> None:
    witness = Witness("static_fair", max_bs=4, n_slots=10)
    for request_id, prompt in ((1, 3), (2, 3), (3, 5), (4, 1)):
        witness.submit(request_id, prompt, generate=1)
    witness.drain()
    assert witness.batches == [[1, 2], [3, 4]]


def test_static_runs_one_batch_at_a_time() -> None:
    witness = Witness("static_fair", max_bs=1, n_workers=3)
    for request_id in (A, B):
        witness.submit(request_id, prompt=1, generate=2)
    assert witness.schedule() is not None
    assert witness.schedule() is None
    witness.drain()
    assert witness.batches == [[A], [A], [B], [B]]


def test_cancel_frees_at_once_what_no_iteration_in_flight_writes() -> None:
    witness = Witness(max_bs=1, n_slots=8)
    witness.submit(1, prompt=4, generate=4)
    witness.submit(2, prompt=4, generate=4)
    assert ends(witness.cancel(2)) == {2: "cancelled"}  # waits
    witness.submit(3, prompt=4, generate=4)
    witness.schedule()
    assert witness.cancel(1) == []  # in flight: its slots are still being written
    assert witness.scheduler.occupancy().slots_reserved == 8
    assert ends(witness.complete()) == {1: "cancelled"}
    witness.step()
    assert ends(witness.cancel(3)) == {3: "cancelled"}  # between two iterations
    assert witness.scheduler.occupancy().slots_reserved == 0
    assert witness.cancel(3) == witness.cancel(99) == []


def test_static_cancel_answers_at_once_but_keeps_the_row() -> None:
    witness = Witness("static_fair", max_bs=3)
    for request_id, generate in ((A, 1), (B, 3), (C, 3)):
        witness.submit(request_id, prompt=2, generate=generate)
    witness.step()
    assert ends(witness.cancel(A)) == {A: "cancelled"}  # had ended; its answer was withheld
    assert ends(witness.cancel(B)) == {B: "cancelled"}
    witness.schedule()
    assert witness.batches[-1] == [A, B, C]
    assert witness.cancel(C) == []
    assert ends(witness.complete()) == {C: "cancelled"}
    assert not witness.scheduler.has_work


def test_static_failure_answers_at_once_and_only_once() -> None:
    witness = Witness("static_fair", max_bs=2)
    for request_id in (A, B):
        witness.submit(request_id, prompt=2, generate=2)
    witness.schedule()
    assert ends(witness.complete(failed=(A,))) == {A: "error"}
    assert witness.cancel(A) == []
    assert ends(witness.step()) == {B: "length"}


def test_static_batch_ends_when_its_last_running_member_is_cancelled() -> None:
    witness = Witness("static_fair", max_bs=2)
    witness.submit(A, prompt=2, generate=1)
    witness.submit(B, prompt=2, generate=9)
    witness.step()
    assert ends(witness.cancel(B)) == {A: "length", B: "cancelled"}
    assert not witness.scheduler.has_work


def test_a_stop_token_ends_the_request_and_is_part_of_it() -> None:
    witness = Witness()
    witness.submit(1, prompt=1, generate=9, stop=[5])
    witness.step()
    witness.schedule()
    (event,) = witness.complete([5])
    assert (event.token_ids, event.finish_reason) == ([5], "stop")


def test_a_row_that_returns_without_a_token_ends_with_an_error() -> None:
    witness = Witness()
    witness.submit(1, prompt=1, generate=2)
    witness.submit(2, prompt=1, generate=2)
    witness.schedule()
    lone, other = witness.complete([-1, 7])
    assert (lone.finish_reason, lone.code, lone.message) == ("error", "INTERNAL", "no token was sampled")
    assert (other.finish_reason, other.token_ids) == (None, [7])


@pytest.mark.parametrize(
    ("prompt", "generate", "why"),
    [
        (0, 1, "no tokens"),
        (1, 0, "at least 1 token"),
        (50, 51, "limit of 100"),
        (40, 41, "do not fit into the 80 K/V slots"),
    ],
)
def test_what_can_never_run_is_rejected(prompt: int, generate: int, why: str) -> None:
    scheduler = Witness(n_slots=90, block_size=16, max_model_len=100).scheduler
    with pytest.raises(Rejected, match=why):
        scheduler.submit(Request(request_id=1, prompt_ids=[1] * prompt, max_new_tokens=generate))
    assert not scheduler.has_work


@pytest.mark.parametrize("policy", ["orca", "static_fair"])
def test_what_just_fits_an_empty_pool_runs(policy: str) -> None:
    witness = Witness(policy, n_slots=90, block_size=16, max_model_len=100)
    witness.submit(1, prompt=40, generate=40)
    witness.drain()


def test_an_id_is_rejected_while_it_is_served_and_free_afterwards() -> None:
    witness = Witness()
    for _ in range(2):
        witness.submit(1, prompt=1, generate=2)
        with pytest.raises(Rejected, match="already"):
            witness.submit(1, prompt=1, generate=2)
        witness.step()
        with pytest.raises(Rejected, match="already"):
            witness.submit(1, prompt=1, generate=2)
        witness.step()
    assert witness.batches == [[1], [1], [1], [1]]


def test_a_pool_without_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="one block of 16"):
        Witness(n_slots=15, block_size=16)


def test_results_that_do_not_match_an_iteration() -> None:
    witness = Witness()
    with pytest.raises(KeyError):
        witness.scheduler.update(IterationResult(iteration_id=1, sampled=[]))
    with pytest.raises(KeyError):
        witness.scheduler.fail_iteration(1, "lost")
    witness.submit(1, prompt=1, generate=2)
    witness.schedule()
    (event,) = witness.scheduler.update(IterationResult(iteration_id=1, sampled=[7, 7]))
    assert (event.code, event.message) == ("INTERNAL", "2 tokens for 1 sequences")
    assert not witness.scheduler.has_work
