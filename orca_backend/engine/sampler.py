"""The sampler of the runner: per-sequence sampling state, and one token per row of logits.

Legend: R = rows to sample in this iteration, V = vocabulary size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from orca_backend.request import SamplerSettings
from orca_backend.scheduler.iteration import JoiningSequence
from orca_kernels import cpu, sampling

NOT_FINITE = "the model gave logits that are not finite"


class Sampler(Protocol):
    """Remembers the sequences that have joined, and chooses their tokens."""

    def join(self, sequence: JoiningSequence) -> None:
        """Remember a sequence that joins, perhaps again, with something generated."""
        ...

    def drop(self, request_id: int) -> None:
        """Forget a sequence, if it is known."""
        ...

    def choose(
        self, logits_rv: npt.NDArray[np.float32], request_ids: Sequence[int], positions: Sequence[int]
    ) -> list[int | str]:
        """One entry per row: the chosen token id, or for a row that cannot have one (and fails alone) a message.

        `logits_rv` [R, V] float32, changed in place; `request_ids` (distinct) and `positions` [R]: the sequence of
        each row, and the position in it of the token to choose (prompt tokens come first).
        """
        ...


def is_greedy(settings: SamplerSettings) -> bool:
    """Whether the best token is wanted instead of a draw."""
    return settings.temperature == 0.0 or settings.top_p == 0.0


def is_penalized(settings: SamplerSettings) -> bool:
    """Whether tokens that have occurred count."""
    s = settings
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def stop_tokens(sequence: JoiningSequence, vocab_size: int) -> npt.NDArray[np.int64]:
    """Those that have a logit: a client may name any integer."""
    return np.array([token for token in sequence.stop_token_ids if 0 <= token < vocab_size], dtype=np.int64)


def occurrences(sequence: JoiningSequence) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Distinct token ids of prompt and output, ascending, and how often each is in the output."""
    ids = np.unique(np.array([*sequence.prompt_ids, *sequence.output_ids], dtype=np.int64))
    places = np.searchsorted(ids, np.array(sequence.output_ids, dtype=np.int64))
    return ids, np.bincount(places, minlength=len(ids)).astype(np.float32)


class CompiledSampler:
    """All rows in one call of the compiled kernels."""

    def __init__(self, vocab_size: int, team: ctypes.c_void_p | None = None) -> None:
        """`team`: threads that share the rows; None: the calling thread alone."""
        self._vocab_size = vocab_size
        self._team = team
        self._rows: dict[int, cpu.SamplingRow] = {}

    def join(self, sequence: JoiningSequence) -> None:
        """See Sampler."""
        settings = sequence.sampling
        self._rows[sequence.request_id] = cpu.SamplingRow(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=settings.seed,
            greedy=is_greedy(settings),
            repetition=settings.repetition_penalty,
            presence=settings.presence_penalty,
            frequency=settings.frequency_penalty,
            occurred=occurrences(sequence) if is_penalized(settings) else None,
            stop=stop_tokens(sequence, self._vocab_size),
            ends_from=len(sequence.prompt_ids) + settings.min_tokens,
        )

    def drop(self, request_id: int) -> None:
        """See Sampler."""
        self._rows.pop(request_id, None)

    def choose(
        self, logits_rv: npt.NDArray[np.float32], request_ids: Sequence[int], positions: Sequence[int]
    ) -> list[int | str]:
        """See Sampler."""
        tokens = cpu.sample_rows(logits_rv, [self._rows[i] for i in request_ids], positions, self._team)
        return [NOT_FINITE if token < 0 else token for token in tokens]


class NumpySampler:
    """Row after row in NumPy: the specification of the compiled one, and its replacement where that cannot be built."""

    def __init__(self, vocab_size: int) -> None:
        """No sequences yet."""
        self._vocab_size = vocab_size
        self._states: dict[int, _State] = {}

    def join(self, sequence: JoiningSequence) -> None:
        """See Sampler."""
        self._states[sequence.request_id] = _State(sequence, self._vocab_size)

    def drop(self, request_id: int) -> None:
        """See Sampler."""
        self._states.pop(request_id, None)

    def choose(
        self, logits_rv: npt.NDArray[np.float32], request_ids: Sequence[int], positions: Sequence[int]
    ) -> list[int | str]:
        """See Sampler."""
        states = [self._states[i] for i in request_ids]
        for logits_v, state, position in zip(logits_rv, states, positions, strict=True):
            state.rewrite(logits_v, position)
        best = logits_rv.argmax(axis=1)
        # argmax finds a NaN or +inf wherever it is in the row, and -inf only if there is nothing else.
        finite = np.isfinite(logits_rv[np.arange(len(states)), best])
        chosen: list[int | str] = []
        for row, (state, position) in enumerate(zip(states, positions, strict=True)):
            if not finite[row]:
                chosen.append(NOT_FINITE)
                continue
            token_id = int(best[row]) if is_greedy(state.settings) else _draw(logits_rv[row], state.settings, position)
            if state.occurrences is not None:
                state.occurrences.add(token_id)
            chosen.append(token_id)
        return chosen


class _State:
    """What the NumPy sampler remembers of one sequence between iterations."""

    def __init__(self, sequence: JoiningSequence, vocab_size: int) -> None:
        self.settings = sequence.sampling
        self.ends_from = len(sequence.prompt_ids) + sequence.sampling.min_tokens
        self.stop = stop_tokens(sequence, vocab_size)
        self.occurrences = _Occurrences(sequence) if is_penalized(sequence.sampling) else None

    def rewrite(self, logits_v: npt.NDArray[np.float32], position: int) -> None:
        """Penalties, and no end before min_tokens."""
        if self.occurrences is not None:
            sampling.penalize(
                logits_v,
                self.occurrences.ids,
                self.occurrences.counts,
                repetition=self.settings.repetition_penalty,
                presence=self.settings.presence_penalty,
                frequency=self.settings.frequency_penalty,
            )
        if position < self.ends_from:
            logits_v[self.stop] = -np.inf


class _Occurrences:
    """Which tokens a sequence holds, and how often each is in its output; grows by one token per iteration."""

    def __init__(self, sequence: JoiningSequence) -> None:
        ids, counts = occurrences(sequence)
        self._index = {int(token): i for i, token in enumerate(ids)}
        self._ids = np.concatenate([ids, np.zeros(64, dtype=np.int64)])
        self._counts = np.concatenate([counts, np.zeros(64, dtype=np.float32)])

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        i = self._index.setdefault(token_id, len(self._index))
        if i == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[i] = token_id
        self._counts[i] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids of prompt and output."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` is in the output."""
        return self._counts[: len(self._index)]


def _draw(logits_v: npt.NDArray[np.float32], settings: SamplerSettings, position: int) -> int:
    return sampling.sample(
        logits_v,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        noise=sampling.uniform(settings.seed, position),
    )
