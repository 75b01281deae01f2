"""The samplers of the runner, compiled and NumPy: penalties, min_tokens, rows that fail alone, any batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from orca_backend.engine.sampler import CompiledSampler, NumpySampler, Sampler
from orca_backend.request import SamplerSettings
from orca_backend.scheduler.iteration import JoiningSequence
from orca_kernels import cpu

VOCABULARY = 300


@pytest.fixture(params=["compiled", "numpy"])
def sampler(request) -> Sampler:
    if request.param == "numpy":
        return NumpySampler(VOCABULARY)
    if obstacle := cpu.obstacle(torch.float32):
        pytest.skip(f"no compiled kernels here: {obstacle}")
    return CompiledSampler(VOCABULARY)


IDS = itertools.count()


def join(sampler: Sampler, prompt_ids=(1, 2, 3), stop_token_ids=(), output_ids=(), **sampling) -> int:
    """The id of a sequence that the sampler now knows."""
    request_id = next(IDS)
    sampler.join(
        JoiningSequence(
            request_id=request_id,
            prompt_ids=list(prompt_ids),
            block_ids=[0],
            stop_token_ids=list(stop_token_ids),
            output_ids=list(output_ids),
            sampling=SamplerSettings(**sampling),
        )
    )
    return request_id


def logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCABULARY)).astype(np.float32)


def test_greedy_by_temperature_zero_and_by_top_p_zero(sampler):
    x = logits(2)
    ids = [join(sampler, temperature=0.0), join(sampler, temperature=1.0, top_p=0.0)]
    assert sampler.choose(x.copy(), ids, [3, 3]) == x.argmax(1).tolist()


def test_the_first_of_equals_is_the_best(sampler):
    x = np.zeros((3, VOCABULARY), dtype=np.float32)
    x[0, [70, 71, 299]], x[1, [299]], x[2, 1:] = 1, 1, -1
    assert sampler.choose(x, [join(sampler) for _ in range(3)], [3] * 3) == [70, 299, 0]


def test_a_row_that_is_not_finite_fails_alone(sampler):
    x = logits(6)
    best = x.argmax(1).tolist()
    x[0, 5], x[1, 7], x[2, :], x[3, -1] = np.nan, np.inf, -np.inf, np.nan
    x[4, (best[4] + 1) % VOCABULARY] = -np.inf  # a forbidden token is no fault
    ids = [join(sampler, temperature=0.5), join(sampler, top_k=3, temperature=1.0), *(join(sampler) for _ in range(4))]
    chosen = sampler.choose(x, ids, [3] * 6)
    assert [isinstance(choice, str) for choice in chosen] == [True] * 4 + [False] * 2
    assert chosen[4:] == best[4:]


def test_same_seed_gives_the_same_tokens_in_any_batch(sampler):
    def run(companions: int, row: int) -> list:
        others = [join(sampler, temperature=1.0, seed=i) for i in range(companions)]
        mine = join(sampler, temperature=1.0, seed=42, repetition_penalty=1.3)
        ids = [*others[:row], mine, *others[row:]]
        tokens = []
        for step in range(20):
            x = logits(companions + 1, seed=1000 + step)
            x[row] = logits(1, seed=step)[0]
            tokens.append(sampler.choose(x, ids, [3 + step] * len(ids))[row])
        return tokens

    alone = run(0, 0)
    assert alone == run(6, 0) == run(6, 4)
    assert len(set(alone)) > 5


def test_both_samplers_choose_the_same_tokens():
    """Rows of every kind, over many tokens, so that what penalties count grows."""
    if obstacle := cpu.obstacle(torch.float32):
        pytest.skip(f"no compiled kernels here: {obstacle}")
    settings = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.7, "presence_penalty": 0.1},
        {"temperature": 3.0, "frequency_penalty": -0.3, "top_p": 0.5, "min_tokens": 30},
        {"repetition_penalty": 1.1, "presence_penalty": 1e-9},
        {"top_p": 0.0, "temperature": 1.0, "min_tokens": 2**70},
    ]
    samplers = [CompiledSampler(VOCABULARY), NumpySampler(VOCABULARY)]
    answers = []
    for sampler in samplers:
        ids = [
            join(sampler, prompt_ids=range(i, 3 * i + 1), stop_token_ids=range(0, 300, 3), seed=i - 2**65, **of)
            for i, of in enumerate(settings)
        ]
        steps = range(100)
        positions = [[2 * i + 1 + step for i in range(len(ids))] for step in steps]
        answers.append([sampler.choose(logits(len(ids), seed=step), ids, positions[step]) for step in steps])
    assert answers[0] == answers[1]
    assert all(len({row[i] for row in answers[0]}) > 20 for i in range(len(settings)))


def test_a_sequence_that_left_is_forgotten(sampler):
    gone, stays = join(sampler), join(sampler)
    sampler.drop(gone)
    sampler.drop(gone)
    assert sampler.choose(logits(1), [stays], [3]) == [int(logits(1).argmax())]
    with pytest.raises(KeyError):
        sampler.choose(logits(1), [gone], [3])


def test_penalties_count_prompt_and_output_apart(sampler):
    mine = join(sampler, prompt_ids=[0], frequency_penalty=1.0)
    x = np.zeros((1, VOCABULARY), dtype=np.float32)
    x[0, :3] = [2.5, 2.0, 0.6]
    # Token 0 stands in the prompt only, so it is not penalized at first; each occurrence in the output costs 1.
    assert [sampler.choose(x.copy(), [mine], [1 + i])[0] for i in range(6)] == [0, 1, 0, 1, 2, 0]
    again = join(sampler, prompt_ids=[0], output_ids=[0, 1, 0], frequency_penalty=1.0)  # after preemption
    assert [sampler.choose(x.copy(), [again], [4 + i])[0] for i in range(3)] == [1, 2, 0]
    repeated = join(sampler, prompt_ids=[0], repetition_penalty=2.0)
    assert sampler.choose(x.copy(), [repeated], [1])[0] == 1  # 2.5 / 2 < 2.0


def test_occurrences_grow_past_their_first_allocation(sampler):
    mine = join(sampler, prompt_ids=[0], presence_penalty=2.0)
    x = np.tile(np.linspace(1, 0, VOCABULARY, dtype=np.float32), (1, 1))
    chosen = [sampler.choose(x.copy(), [mine], [1 + i])[0] for i in range(VOCABULARY)]
    assert chosen == list(range(VOCABULARY))  # every token once, best first


def test_no_stop_token_before_min_tokens(sampler):
    x = np.zeros((1, VOCABULARY), dtype=np.float32)
    x[0, 7], x[0, 8], x[0, 9] = 3, 2, 1
    # Ids outside the vocabulary are harmless.
    mine = join(sampler, stop_token_ids=[7, 8, 10**9, 2**70, -5], min_tokens=2)
    assert [sampler.choose(x.copy(), [mine], [3 + i])[0] for i in range(3)] == [9, 9, 7]
