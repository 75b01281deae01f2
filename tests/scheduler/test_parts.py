"""What each policy does that Algorithm 1 does not, by cases with a known answer; combinations that are refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from witness import Witness

from orca_backend.config import ConfigError, SchedulerConfig, load_config
from orca_backend.scheduler.iteration import Row


def rows(witness: Witness) -> list[Row]:
    """The rows of the next iteration, which returns at once."""
    batch = witness.schedule()
    assert batch is not None
    witness.complete()
    return batch.rows


def most_running(witness: Witness) -> int:
    """Drain; the greatest batch there was."""
    witness.drain()
    return max(map(len, witness.batches))


def test_sarathi_single_tokens_first_then_the_prompt_begun_then_new_ones() -> None:
    witness = Witness("sarathi", max_bs=4, token_budget=8)
    witness.submit(1, 3, 9)
    assert rows(witness) == [Row(1, 0, 3)]
    witness.submit(2, 12, 9)
    witness.submit(3, 4, 9)
    assert rows(witness) == [Row(1, 3, 1), Row(2, 0, 7, sample=False)]
    assert rows(witness) == [Row(1, 4, 1), Row(2, 7, 5), Row(3, 0, 2, sample=False)]
    assert rows(witness) == [Row(1, 5, 1), Row(2, 12, 1), Row(3, 2, 2)]


def test_vllm_runs_prompts_by_themselves() -> None:
    witness = Witness("vllm", max_bs=4)
    witness.submit(1, 3, 9)
    rows(witness)
    witness.submit(2, 2, 9)
    assert rows(witness) == [Row(2, 0, 2)]
    assert rows(witness) == [Row(1, 3, 1), Row(2, 2, 1)]


def test_vllm_preempts_the_last_and_computes_it_again_with_its_output() -> None:
    witness = Witness("vllm", max_bs=4, n_slots=10, watermark=0)
    witness.submit(1, 4, 6)
    witness.submit(2, 4, 6)
    rows(witness)
    assert rows(witness) == [Row(1, 4, 1), Row(2, 4, 1)]
    assert rows(witness) == [Row(1, 5, 1)]
    assert witness.scheduler.occupancy().waiting == witness.preemptions == 1
    while 1 in witness.pool:
        rows(witness)
    batch = witness.schedule()
    assert batch is not None
    assert batch.rows == [Row(2, 0, 6)]
    assert batch.token_ids == [2000, 2001, 2002, 2003, 7, 7]
    assert batch.joining[0].output_ids == [7, 7]


def test_swapping_brings_it_back_without_computing_again() -> None:
    witness = Witness("vllm", preemption="swap", swap_slots=8, max_bs=4, n_slots=10, watermark=0)
    witness.submit(1, 4, 6)
    witness.submit(2, 4, 6)
    for _ in range(2):
        rows(witness)
    batch = witness.schedule()
    assert batch is not None
    assert [row.request_id for row in batch.rows] == [1]
    assert len(batch.swapped_out) == 5
    while 1 in witness.pool:
        witness.complete()
        batch = witness.schedule()
        assert batch is not None
    assert batch.rows == [Row(2, 5, 1)]
    assert len(batch.swapped_in) == 5


def test_a_cancel_while_swapped_out_frees_the_host_blocks() -> None:
    witness = Witness("vllm", preemption="swap", swap_slots=5, max_bs=4, n_slots=10, watermark=0)
    witness.submit(1, 4, 6)
    witness.submit(2, 4, 6)
    while not witness.preemptions:
        rows(witness)
    assert witness.scheduler.preemption._free == []
    assert witness.cancel(2)
    witness.drain()  # asserts that all host blocks are free


def test_nobody_is_preempted_for_blocks_that_an_iteration_in_flight_still_writes() -> None:
    """Nor is the one that needs them: those behind it come back by themselves, and then lose theirs."""
    witness = Witness("vllm", max_bs=1, n_workers=2, n_slots=10, watermark=0)
    witness.submit(1, 4, 6)
    witness.submit(2, 4, 6)
    while witness.scheduler.occupancy().slots_reserved < 10:
        witness.step()
    while witness.schedule():
        pass
    assert [row.request_id for row in witness.in_flight[0][0].rows] == [2]
    assert len(witness.in_flight) == 1
    assert witness.preemptions == 0
    witness.complete()
    assert [row.request_id for row in rows(witness)] == [1]
    assert witness.preemptions == 1
    witness.drain()


def test_peak_runs_more_requests_than_reservations_and_preempts_nobody() -> None:
    def run(policy: str) -> Witness:
        witness = Witness(policy, max_bs=16, n_slots=120)
        for i in range(16):
            witness.submit(i, 4, 4 + 4 * (i % 5))
        return witness

    orca, peak = run("orca"), run("peak")
    assert most_running(peak) > most_running(orca)
    assert len(peak.batches) < len(orca.batches)
    assert peak.preemptions == 0


def test_vllm_runs_more_than_orca_and_orca_more_than_orca_max() -> None:
    most = {}
    for policy in ("orca_max", "orca", "vllm"):
        witness = Witness(policy, max_bs=16, n_slots=160, max_model_len=40)
        for i in range(16):
            witness.submit(i, 4, 16)
        most[policy] = most_running(witness)
    assert most == {"orca_max": 4, "orca": 8, "vllm": 16}


def test_static_ft_begins_at_the_shortest_prompt() -> None:
    """Paper, section 6.2; the rest of the longer prompt goes in like generated tokens."""
    witness = Witness("static_ft", max_bs=2, max_model_len=100)
    witness.submit(1, 2, 2)
    witness.submit(2, 5, 2)
    assert rows(witness) == [Row(1, 0, 2), Row(2, 0, 2, sample=False)]
    assert rows(witness) == [Row(1, 2, 1), Row(2, 2, 1, sample=False)]
    assert rows(witness) == [Row(1, 2, 1, sample=False), Row(2, 3, 1, sample=False)]
    assert rows(witness) == [Row(1, 2, 1, sample=False), Row(2, 4, 1)]
    assert rows(witness) == [Row(1, 2, 1, sample=False), Row(2, 5, 1)]
    assert not witness.pool


# ---- the prefix cache


def hits(witness: Witness) -> int:
    return witness.scheduler.occupancy().prefix_hits


def test_a_prefix_is_found_again_but_never_by_another_tenant_or_salt() -> None:
    witness = Witness(block_size=4, prefix_cache=True)
    for request_id, (tenant, salt) in enumerate(itertools.product(("a", "b", "ab", ""), ("", "b", "x"))):
        witness.submit(request_id, 22, 2, shared=21, tenant=tenant, cache_salt=salt)
        witness.drain()
        assert hits(witness) == 0
    witness.submit(99, 22, 2, shared=21, tenant="a", cache_salt="x")
    witness.drain()
    assert hits(witness) == 20  # whole blocks of the 21


def test_a_prompt_that_is_cached_as_a_whole_computes_its_last_token_in_a_copy() -> None:
    witness = Witness(block_size=4, prefix_cache=True)
    witness.submit(1, 8, 3, shared=8)
    witness.drain()
    witness.submit(2, 8, 3, shared=8)
    batch = witness.schedule()
    assert batch is not None
    assert batch.rows == [Row(2, 7, 1)]
    ((source, target),) = batch.copied
    assert batch.joining[0].block_ids[1] == target != source
    assert hits(witness) == 7
    witness.complete()
    witness.drain()


def test_those_that_run_share_and_blocks_are_counted_once() -> None:
    witness = Witness(block_size=4, prefix_cache=True, max_bs=8)
    witness.submit(0, 21, 9, shared=20)
    witness.step()
    for request_id in range(1, 5):
        witness.submit(request_id, 21, 9, shared=20)
    witness.step()
    assert witness.scheduler.occupancy().slots_reserved == 4 * (5 + 5 * 3)
    witness.drain()


def test_the_least_recently_used_is_evicted_tail_first() -> None:
    witness = Witness(block_size=4, prefix_cache=True, n_slots=40, max_bs=1)
    witness.submit(1, 17, 1, shared=16)  # 4 blocks stay cached
    witness.drain()
    witness.submit(2, 29, 1)  # takes the 6 free ones and 2 cached
    witness.drain()
    witness.submit(3, 17, 1, shared=16)
    witness.drain()
    assert hits(witness) == 8


# ---- what does not fit together


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"policy": "vllm", "preemption": "none"}, "preemption: none with admission: prompt could run out"),
        ({"preemption": "recompute"}, "preemption: recompute has no use with admission: orca"),
        ({"policy": "orca_max", "preemption": "swap"}, "preemption: swap has no use with admission: max"),
        ({"policy": "static_fair", "admission": "peak"}, "admission: peak needs requests to leave when they end"),
        ({"policy": "vllm", "selection": "static"}, "admission: prompt needs requests to leave"),
        ({"policy": "peak", "n_workers": 2}, "admission: peak .* selection: orca and n_workers: 1"),
        ({"policy": "peak", "selection": "token_budget"}, "admission: peak .* selection: orca and n_workers: 1"),
        ({"token_budget": 64}, "token_budget has no use with selection: orca"),
        ({"policy": "sarathi", "token_budget": 16}, "token_budget: 16 is below max_bs: 32"),
    ],
)
def test_parts_that_do_not_fit_together(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.convert(settings, SchedulerConfig)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            {"scheduler.policy": "vllm", "scheduler.preemption": "swap"},
            "kv_cache.swap_memory: 0: swapping needs memory",
        ),
        ({"kv_cache.swap_memory": "1MiB"}, "scheduler.preemption: none with kv_cache.swap_memory: 1MiB"),
        ({"scheduler.policy": "static_ft", "kv_cache.prefix_cache": True}, "kv_cache.prefix_cache has no use"),
        ({"scheduler.order": "cached"}, "scheduler.order: cached needs kv_cache.prefix_cache"),
        ({"scheduler.order": "lifo"}, "scheduler.order=lifo: not 'lifo'; allowed are fcfs, priority, .*cached"),
    ],
)
def test_sections_that_do_not_fit_together(tmp_path: Path, overrides: dict[str, Any], why: str) -> None:
    (tmp_path / "engine.yaml").write_text("model: x")
    with pytest.raises(ConfigError, match=re.compile(why)):
        load_config(tmp_path / "engine.yaml", overrides)


@pytest.mark.parametrize("admission", ["orca", "max", "peak"])
@pytest.mark.parametrize("selection", ["orca", "prefill_first", "token_budget"])
def test_parts_set_by_themselves(admission: str, selection: str) -> None:
    """Whatever is allowed also works."""
    settings: dict[str, Any] = {"admission": admission, "selection": selection}
    if admission == "peak":
        settings["preemption"] = "recompute"
    witness = Witness("orca", max_bs=3, n_slots=60, max_model_len=30, block_size=4, **settings)
    for i in range(12):
        witness.submit(i, 3 + i, 5 + i % 4)
    witness.drain()
