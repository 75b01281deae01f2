"""Sampling in the Triton language, under its interpreter, against the NumPy functions that are its specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orca_kernels import sampling
from orca_kernels.gpu.sampler_table import SamplerTable
from orca_kernels.gpu.sampling import sample, top_log_probabilities

OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0,
    "seed": 0, "min_position": 0, "prompt_ids": [], "output_ids": [], "stop_ids": [],
}  # fmt: skip


def specified(logits: np.ndarray, position: int, row: dict) -> int:
    """The token by the NumPy functions."""
    logits = logits.copy()
    seen = sorted({*row["prompt_ids"], *row["output_ids"]})
    if row["repetition"] != 1 or row["presence"] or row["frequency"]:
        counts = np.array([row["output_ids"].count(i) for i in seen], dtype=np.float32)
        penalties = {name: row[name] for name in ("repetition", "presence", "frequency")}
        sampling.penalize(logits, np.array(seen, dtype=np.int64), counts, **penalties)
    if position < row["min_position"]:
        logits[row["stop_ids"]] = -np.inf
    if row["temperature"] == 0 or row["top_p"] == 0:
        return int(logits.argmax())
    options = {name: row[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    return sampling.sample(logits, noise=sampling.uniform(row["seed"], position), **options)


def run(logits: np.ndarray, positions: list[int], rows: list[dict]) -> tuple[list[int], torch.Tensor, SamplerTable]:
    """Put the rows into scattered slots, with a row of padding in between, and sample."""
    slots = [2 * i + 1 for i in range(len(rows))]
    table = SamplerTable.empty(2 * len(rows) + 1, logits.shape[1], "cpu")
    for slot, row in zip(slots, rows, strict=True):
        table.put(slot, **row)
    padded = torch.from_numpy(np.concatenate([logits[:1], np.full_like(logits[:1], np.nan), logits[1:]]))
    before = padded.clone()
    tokens, log_probabilities = sample(
        padded,
        torch.tensor([slots[0], -1, *slots[1:]], dtype=torch.int32),
        torch.tensor([positions[0], 0, *positions[1:]]),
        table,
    )
    torch.testing.assert_close(padded, before, rtol=0, atol=0, equal_nan=True)  # the raw logits stay as they are
    keep = [i for i in range(len(padded)) if i != 1]
    assert table.last_tokens[slots].tolist() == tokens[keep].clamp(min=0).tolist()
    assert not table.last_tokens[::2].any()  # slots of nobody
    return tokens[keep].tolist(), log_probabilities[keep], table


@pytest.mark.parametrize(("vocabulary", "count"), [(1, 4), (37, 24), (4100, 18)])
def test_draws_the_tokens_of_the_specification(vocabulary, count):
    generator = np.random.default_rng(vocabulary)
    spread = generator.choice([0.01, 1.0, 5.0, 40.0], size=(count, 1))
    logits = generator.normal(0, spread, (count, vocabulary)).astype(np.float32)
    logits[::2] = np.round(logits[::2] * 4) / 4  # equal logits are frequent
    pick = generator.choice
    rows = []
    for i in range(len(logits)):
        row = {**OFF, "seed": int(generator.integers(-(2**63), 2**63 - 1)), "temperature": float(pick([0, 0.05, 1, 3]))}
        if i % 2:
            row |= {
                "top_k": int(pick([0, 1, 2, 40, 5000])), "top_p": float(pick([1.0, 0.999, 0.9, 0.3, 1e-4])),
                "min_p": float(pick([0.0, 0.0, 1e-9, 0.02, 0.5, 1.0])),
            }  # fmt: skip
        if i % 3 == 0:
            row |= {"repetition": 1.3, "presence": 0.5, "frequency": float(pick([0.0, 0.25]))}
        if i % 4 == 0:
            row |= {"min_position": int(pick([1, 2000])), "stop_ids": [0, vocabulary // 2] if vocabulary > 2 else []}
        row["prompt_ids"] = generator.integers(0, vocabulary, 20).tolist()
        row["output_ids"] = generator.integers(0, vocabulary, 10).tolist()
        rows.append(row)
    positions = generator.integers(0, 1000, len(rows)).tolist()
    tokens, log_probabilities, _ = run(logits, positions, rows)
    assert tokens == [specified(x, p, row) for x, p, row in zip(logits, positions, rows, strict=True)]
    expected = torch.from_numpy(logits).log_softmax(-1)[torch.arange(len(rows)), tokens]
    torch.testing.assert_close(log_probabilities, expected, rtol=1e-5, atol=1e-5)


def test_occurrences_are_counted_on_the_device():
    """Under a large frequency penalty no token comes twice, though the host never says what was drawn."""
    logits = np.linspace(0, 1, 12, dtype=np.float32)[None]
    table = SamplerTable.empty(1, 12, "cpu")
    table.put(0, **{**OFF, "temperature": 0.0, "frequency": 2.0, "prompt_ids": [3]})
    drawn = [
        int(sample(torch.from_numpy(logits), torch.zeros(1, dtype=torch.int32), torch.tensor([i]), table)[0])
        for i in range(12)
    ]
    assert drawn == list(range(11, -1, -1))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_that_are_not_finite_fail_their_row_alone():
    logits = np.zeros((5, 3000), dtype=np.float32)
    logits[:, 7] = 5
    logits[1, 2999], logits[2, 11], logits[3] = np.nan, np.inf, -np.inf
    logits[4, :7] = -np.inf
    for temperature in (0.0, 0.01):
        tokens, _, table = run(logits, [0] * 5, [{**OFF, "temperature": temperature, "presence": 1.0}] * 5)
        assert tokens == [7, -1, -1, -1, 7]
        assert table.marks[3::2].count_nonzero() == 1  # nothing was counted for the failed rows


def test_extreme_temperatures_do_not_break():
    logits = np.array([[0.0, 3.0, 2.999, -np.inf]] * 8, dtype=np.float32)
    for filters in ({}, {"top_k": 4, "top_p": 0.999999}):
        for temperature, expected in ((1e-40, {1}), (1e6, {0, 1, 2})):
            rows = [{**OFF, **filters, "temperature": temperature, "seed": seed} for seed in range(8)]
            assert set(run(logits, [3] * 8, rows)[0]) == expected


def test_top_log_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(3, 100).half()
    values, ids = top_log_probabilities(logits, 5)
    expected = logits.float().log_softmax(-1)
    torch.testing.assert_close(values, expected.gather(1, ids))
    torch.testing.assert_close(values, expected.sort(descending=True).values[:, :5])
