"""Sampling: the specification against a full sort and its distribution, and the compiled kernel against that."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_kernels import cpu, sampling

needs_compiler = pytest.mark.skipif(
    cpu.obstacle(torch.float32) is not None, reason=f"no compiled kernels here: {cpu.obstacle(torch.float32)}"
)


def kept_by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Mask of the tokens that the filters keep: min_p, then top_k, then top_p among what is left; ties are kept."""
    probabilities = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    probabilities /= probabilities.sum()
    keep = probabilities >= min_p * probabilities.max() * (1 - 1e-9)
    if 0 < top_k < keep.sum():
        keep &= probabilities >= np.sort(probabilities[keep])[-top_k]
    if top_p < 1:
        left = np.where(keep, probabilities, 0.0)
        descending = np.sort(left)[::-1] / left.sum()
        last = np.searchsorted(np.cumsum(descending), top_p * (1 - 1e-6))
        keep &= left / left.sum() >= descending[min(last, len(descending) - 1)] * (1 - 1e-9)
    return keep


@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([1, 2, 37, 600, 3000]),
    spread=st.sampled_from([0.01, 1.0, 5.0, 40.0]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.0001]),
    min_p=st.sampled_from([0.0, 1e-9, 0.02, 0.5, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_draws_only_what_the_filters_keep(seed, vocabulary, spread, temperature, top_k, top_p, min_p):
    generator = np.random.default_rng(seed)
    # Quarter steps: equal logits are frequent, and no probability falls so near a threshold that rounding decides.
    logits = (np.round(generator.normal(0, spread, vocabulary) * 4) / 4).astype(np.float32)
    keep = kept_by_definition(logits, temperature, top_k, top_p, min_p)
    drawn = {
        sampling.sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, noise=noise)
        for noise in [0.0, 1 - 2**-53, *generator.random(40)]
    }
    assert keep[sorted(drawn)].all()
    if keep.sum() <= 2:  # the extremes of the noise reach the first and the last token kept, unless it weighs nothing
        weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
        assert drawn >= set(np.flatnonzero(keep & (weights > 1e-9)).tolist())


@pytest.mark.parametrize("vocabulary", [7, 5000])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_frequencies_are_the_probabilities(vocabulary, filters):
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 1, vocabulary).astype(np.float32)
    logits[:4] += 7
    options = {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    n = 5_000
    draws = [sampling.sample(logits, noise=sampling.uniform(7, i), **options) for i in range(n)]
    keep = kept_by_definition(logits, **options)
    expected = np.where(keep, np.exp((logits - logits.max()).astype(np.float64) / 1.3), 0.0)
    expected *= n / expected.sum()
    counts = np.bincount(draws, minlength=vocabulary)
    # Rare tokens are lumped together; the statistic then is chi-square with the number of groups less one.
    common = expected >= 50
    pairs = [*zip(counts[common], expected[common], strict=True), (counts[~common].sum(), expected[~common].sum())]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs if mean > 0)
    degrees = sum(mean > 0 for _, mean in pairs) - 1
    assert counts[~keep].sum() == 0
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_noise_is_uniform_and_depends_on_seed_and_position():
    values = np.array([sampling.uniform(seed, position) for seed in range(-20, 80) for position in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    mean = len(values) / 20
    assert ((counts - mean) ** 2 / mean).sum() < 19 + 5 * math.sqrt(38)
    assert len(np.unique(values)) == len(values)
    grid = values.reshape(100, 200)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03
    assert sampling.uniform(2**63, 5) == sampling.uniform(-(2**63), 5)  # seeds count modulo 2**64


def test_extreme_temperatures_do_not_break():
    logits = np.array([0.0, 3.0, 2.999, -np.inf], dtype=np.float32)
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert {sampling.sample(logits, temperature=1e-40, noise=n / 10, **options) for n in range(10)} == {1}
    assert {sampling.sample(logits, temperature=1e30, noise=n / 30, **options) for n in range(30)} == {0, 1, 2}
    options["top_k"] = 4
    assert {sampling.sample(logits, temperature=1e30, **options, noise=n / 30) for n in range(30)} == {0, 1, 2}


def test_penalties_follow_their_formulas():
    logits = np.array([2.0, -2.0, 1.0, -1.0, 0.5], dtype=np.float32)
    ids, counts = np.array([0, 1, 3]), np.array([0.0, 2.0, 1.0], dtype=np.float32)
    sampling.penalize(logits, ids, counts, repetition=2.0, presence=0.5, frequency=0.25)
    assert logits.tolist() == [1.0, -4.0 - 0.5 - 0.5, 1.0, -2.0 - 0.5 - 0.25, 0.5]


def test_top_k_one_is_greedy_at_any_temperature():
    logits = np.array([0.0, 3.0, 2.999, 2.9], dtype=np.float32)
    for temperature in (1e-6, 1.0, 1e6):
        draws = {
            sampling.sample(logits, temperature=temperature, top_k=1, top_p=1.0, min_p=0.0, noise=n / 20)
            for n in range(20)
        }
        assert draws == {1}


NO_TOKENS = np.array([], dtype=np.int64)


def random_logits(generator: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Rows that are flat, peaked, full of ties, or forbidden in parts."""
    logits = generator.normal(0, generator.choice([0.0, 0.01, 1, 5, 40], (rows, 1)), (rows, vocabulary))
    coarse = generator.random((rows, 1)) < 0.5
    logits = np.where(coarse, np.round(logits * 4) / 4, logits).astype(np.float32)
    logits[generator.random(logits.shape) < 0.05] = -np.inf
    logits[np.arange(rows), generator.integers(0, vocabulary, rows)] = 3
    return logits


@needs_compiler
@pytest.mark.parametrize(
    ("vocabulary", "batches"), [(1, 5), (2, 20), (16, 20), (37, 40), (600, 60), (3000, 40), (49152, 6)]
)
def test_the_compiled_rows_are_those_of_the_specification(vocabulary, batches):
    """All settings mixed in every batch; whatever the company and the number of threads."""
    generator = np.random.default_rng(vocabulary)
    team = cpu.team(2)
    for _ in range(batches):
        logits = random_logits(generator, 8, vocabulary)
        rows, expected = [], []
        position = int(generator.integers(0, 10_000))
        for logits_v in logits:
            options = {
                "temperature": float(generator.choice([1e-40, 0.05, 0.7, 1, 3, 1e6])),
                "top_k": int(generator.choice([0, 0, 1, 2, 40, 5000, 2**40])),
                "top_p": float(generator.choice([1, 1, 0.999, 0.9, 0.3, 1e-4])),
                "min_p": float(generator.choice([0, 0, 1e-9, 0.02, 0.5, 1])),
            }
            seed, repetition, presence, frequency = (
                int(generator.integers(-(2**63), 2**63)),
                *generator.normal(1, 0.3, 3),
            )
            occurred = generator.choice(vocabulary, min(vocabulary, 50), replace=False)
            stop = generator.choice(vocabulary, vocabulary // 2, replace=False)
            counts = generator.integers(0, 4, len(occurred)).astype(np.float32)
            penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}
            rows.append(
                cpu.SamplingRow(
                    **options,
                    seed=seed,
                    greedy=False,
                    **penalties,
                    occurred=(occurred, counts),
                    stop=stop,
                    ends_from=5000,
                )
            )
            rewritten = logits_v.copy()
            sampling.penalize(rewritten, occurred, counts, **penalties)
            if position < 5000:
                rewritten[stop] = -np.inf
            noise = sampling.uniform(seed, position)
            expected.append(sampling.sample(rewritten, **options, noise=noise) if np.isfinite(rewritten.max()) else -1)
        assert cpu.sample_rows(logits.copy(), rows, [position] * 8, team) == expected


@needs_compiler
def test_logits_that_do_not_fit_are_refused():
    row = cpu.SamplingRow(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, greedy=False, repetition=1.0, presence=0.0,
        frequency=0.0, occurred=None, stop=NO_TOKENS, ends_from=0,
    )  # fmt: skip
    for logits, rows, positions in (
        (np.zeros((1, 8)), [row], [0]),
        (np.zeros((2, 8), dtype=np.float32)[:, ::2], [row] * 2, [0, 0]),
        (np.zeros((1, 8), dtype=np.float32), [row, row], [0, 0]),
        (np.zeros((1, 8), dtype=np.float32), [row], [0, 0]),
    ):
        with pytest.raises(ValueError, match="logits"):
            cpu.sample_rows(logits, rows, positions)
