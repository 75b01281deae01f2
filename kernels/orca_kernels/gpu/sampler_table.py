"""What the sampling kernels know of sequences, on the device, between iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
import torch

from orca_kernels import sampling

GREEDY, PENALIZED = 1, 2  # bits of a sequence's flags
PROMPT, STOP = 1 << 30, 1 << 29  # bits of `marks`; the lower ones count occurrences in the output


@dataclass(frozen=True)
class SamplerTable:
    """What the device knows of S sequences, by slot.

    reals: float64 [S, 7], scale (`scale_of` the temperature), top_p, reach, margin (`margin_of` min_p), and repetition,
    presence and frequency penalty; what the specification rounds to float32 is so rounded.
    integers: int64 [S, 4], seed, top_k, the position before which stop tokens are banned, flags.
    marks: int32 [S, V], for sequences with penalties or a ban: which tokens occur in the prompt, which stop, and how
    often each is in the output. last_tokens: int64 [S], the token sampled last.
    """

    reals: torch.Tensor
    integers: torch.Tensor
    marks: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def empty(cls, slots: int, vocabulary: int, device: torch.device | str) -> SamplerTable:
        """Room for `slots` sequences."""
        return cls(
            reals=torch.zeros(slots, 7, dtype=torch.float64, device=device),
            integers=torch.zeros(slots, 4, dtype=torch.int64, device=device),
            marks=torch.zeros(slots, vocabulary, dtype=torch.int32, device=device),
            last_tokens=torch.zeros(slots, dtype=torch.int64, device=device),
        )

    @staticmethod
    def bytes_per_slot(vocabulary: int) -> int:
        """Bytes that one sequence takes."""
        return 7 * 8 + 4 * 8 + 4 * vocabulary + 8

    def put(
        self,
        slot: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition: float,
        presence: float,
        frequency: float,
        seed: int,
        min_position: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_ids: Sequence[int],
    ) -> None:
        """Let a sequence take `slot`. `temperature` or `top_p` 0 is greedy, `top_k` 0 is off.

        No stop token is drawn for a position before `min_position`. `output_ids`: what it has generated before.
        """
        greedy = temperature == 0.0 or top_p == 0.0
        penalized = repetition != 1.0 or presence != 0.0 or frequency != 0.0
        flags = greedy * GREEDY + penalized * PENALIZED
        scale = sampling.scale_of(temperature)
        reals: list[SupportsFloat] = [scale, top_p, sampling.NO_WEIGHT / scale, sampling.margin_of(min_p, temperature)]
        reals += [np.float32(value) for value in (repetition, presence, frequency)]
        seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        device = self.reals.device
        self.reals[slot] = torch.tensor([float(value) for value in reals], dtype=torch.float64, device=device)
        self.integers[slot] = torch.tensor([seed, max(top_k, 0), min_position, flags], device=device)
        if penalized or (stop_ids and len(prompt_ids) + len(output_ids) < min_position):
            marks = torch.bincount(torch.tensor(output_ids, dtype=torch.int64), minlength=self.marks.shape[1]).int()
            marks[list(set(prompt_ids))] += PROMPT
            marks[list(set(stop_ids))] += STOP
            self.marks[slot] = marks.to(device)
