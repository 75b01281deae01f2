"""Compiled sampling: the tokens of all rows of an iteration in one call, the same that `orca_kernels.sampling` gives.

Legend: R = rows that sample, V = vocabulary size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orca_kernels import sampling
from orca_kernels.cpu import build

_INT64_MAX = (1 << 63) - 1


class _Settings(ctypes.Structure):
    _fields_ = [
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("ends_from", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "margin", "repetition", "presence", "frequency")),
        *((name, ctypes.c_int32) for name in ("top_k", "greedy", "penalized")),
    ]


class SamplingRow:
    """The sampling state of one sequence, kept by the library: settings, stop tokens, and what penalties count."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        greedy: bool,
        repetition: float,
        presence: float,
        frequency: float,
        occurred: tuple[npt.NDArray[np.integer], npt.NDArray[np.floating]] | None,
        stop: npt.NDArray[np.integer],
        ends_from: int,
    ) -> None:
        """Settings as in `orca_kernels.sampling`; `greedy` takes the best token instead of a draw.

        `occurred`: the distinct tokens of prompt and output, and how often each is in the output; None: no penalties.
        `stop`: tokens that are forbidden at positions before `ends_from`. All ids must be in the vocabulary. Raises
        build.CompilerError where the library cannot be had.
        """
        library = build.load()
        settings = _Settings(
            top_p=top_p,
            seed=seed & ((1 << 64) - 1),
            ends_from=min(ends_from, _INT64_MAX),
            scale=sampling.scale_of(temperature),
            margin=sampling.margin_of(min_p, temperature),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            top_k=min(max(top_k, 0), (1 << 31) - 1),
            greedy=greedy,
            penalized=occurred is not None,
        )
        stop = np.ascontiguousarray(stop, dtype=np.int32)
        ids, counts = (
            np.ascontiguousarray(array, dtype=dtype)
            for array, dtype in zip(occurred or ([], []), (np.int32, np.float32), strict=True)
        )
        new = library.orca_sampling_row_new
        new.restype = ctypes.c_void_p
        self._free = library.orca_sampling_row_free
        arrays = (_address(stop), len(stop), _address(ids), _address(counts), len(ids))
        self.handle: int = new(ctypes.byref(settings), *arrays)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._free(ctypes.c_void_p(handle))


def sample_rows(
    logits_rv: npt.NDArray[np.float32],
    rows: Sequence[SamplingRow],
    positions: Sequence[int],
    team: ctypes.c_void_p | None = None,
) -> list[int]:
    """A token for each row of `logits_rv` (float32 [R, V], contiguous, changed in place), or -1 where not finite.

    `positions` [R]: of the token to choose in its sequence. `team` shares the rows; None: this thread
    alone. A row may be there only once. Raises ValueError for logits that do not fit.
    """
    count, vocabulary = logits_rv.shape
    if logits_rv.dtype != np.float32 or not logits_rv.flags.c_contiguous or not count == len(rows) == len(positions):
        raise ValueError(f"logits {logits_rv.dtype} {logits_rv.shape} for {len(rows)} rows, {len(positions)} positions")
    tokens = np.empty(count, dtype=np.int32)
    handles = (ctypes.c_void_p * count)(*(row.handle for row in rows))
    places = np.array(positions, dtype=np.int64)
    build.load().orca_sample(team, _address(logits_rv), vocabulary, count, handles, _address(places), _address(tokens))
    chosen: list[int] = tokens.tolist()
    return chosen


def _address(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
