"""Choose the next token from one row of logits: filters, then inverse-CDF sampling with counter-based noise.

Legend: V = vocabulary size. This is the executable specification, and what runs without compiled kernels; those
(cpu/csrc/sampling.h) give the same token, always: probabilities are rounded to whole multiples of 2^-30 of the best
one, so that no sum depends on its order, and every step before that is one float32 operation that IEEE 754 defines.

The noise is a pure function of (seed, position): a request draws the same numbers alone, in any batch, and after it
was preempted and recomputed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

_MASK = (1 << 64) - 1
_NOISE_BITS = 53
_WEIGHT_BITS = 30
_PART = 64
NO_WEIGHT = np.float32(33)  # powers of two below the best: certainly rounded to 0
# Of 2^x for |x| <= 1/2, highest power first; as in csrc/vector.h.
_EXP2 = (1.54035304e-4, 1.33335581e-3, 9.61812911e-3, 5.55041087e-2, 2.40226507e-1, 6.93147181e-1, 1.0)


def uniform(seed: int, position: int) -> float:
    """The noise of one draw: a number in [0, 1) from `seed` (any int) and `position` (of the token in its sequence).

    Two rounds of the splitmix64 finalizer (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    x = seed & _MASK
    for increment in (0x9E3779B97F4A7C15, ((position + 1) * 0xD1342543DE82EF95) & _MASK):
        x = (x + increment) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return (x >> (64 - _NOISE_BITS)) / float(1 << _NOISE_BITS)


def penalize(
    logits_v: Logits,
    token_ids: npt.NDArray[np.int64],
    output_counts: npt.NDArray[np.float32],
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Apply penalties (rounded to float32) in place to the tokens that have occurred.

    `token_ids`: distinct ids of prompt and output; `output_counts`: how often each is in the output (0: prompt only).
    Repetition (CTRL, Keskar et al. 2019) divides positive and multiplies negative logits of all of them; presence and
    frequency (OpenAI) subtract once, and once per occurrence, for tokens of the output.
    """
    repetition, presence, frequency = (float(np.float32(value)) for value in (repetition, presence, frequency))
    values = logits_v[token_ids].astype(np.float64)
    values = np.where(values > 0, values / repetition, values * repetition)
    logits_v[token_ids] = values - (frequency * output_counts.astype(np.float64) + presence * (output_counts > 0))


def scale_of(temperature: float) -> np.float32:
    """What turns a difference of logits into powers of two."""
    return np.float32(math.log2(math.e) / max(temperature, 1e-30))


def margin_of(min_p: float, temperature: float) -> np.float32:
    """How far from the best logit `min_p` lets others be: at most 0."""
    return np.float32(math.log(min_p) * temperature if min_p > 0 else -math.inf)


def sample(logits_v: Logits, *, temperature: float, top_k: int, top_p: float, min_p: float, noise: float) -> int:
    """Draw one token id from finite-maximum `logits_v` with `noise` in [0, 1), a multiple of 2^-53.

    Filters in vLLM's order on the tempered distribution: min_p (relative to the best), then top_k, then top_p among
    what is left (always at least one token). Ties with the last token kept are all kept. `temperature` must be > 0.
    """
    best, scale = logits_v.max(), scale_of(temperature)
    least = max(best + margin_of(min_p, temperature), best - NO_WEIGHT / scale, _top_k_bound(logits_v, top_k))
    ids = np.flatnonzero(logits_v >= least)
    if 0 < top_k < len(ids):  # by logits: at a high temperature different ones have the same weight
        values = logits_v[ids]
        ids = ids[values >= np.partition(values, -top_k)[-top_k]]
    weights = _weights(logits_v[ids], best, scale)
    if top_p < 1.0:
        total = int(weights.sum())
        wanted = math.ceil(top_p * total)
        # Those of at most this weight together weigh no more than may be left out: only the others are sorted.
        descending = np.sort(weights[weights > (total - wanted) // len(weights)])[::-1]
        keep = weights >= descending[np.searchsorted(np.cumsum(descending), wanted)]
        ids, weights = ids[keep], weights[keep]
    target = int(noise * (1 << _NOISE_BITS)) * int(weights.sum()) >> _NOISE_BITS
    return int(ids[np.searchsorted(np.cumsum(weights), target, side="right")])


def _top_k_bound(logits_v: Logits, top_k: int) -> np.float32:
    """What the k-th best logit cannot be below, so that few are looked at: the k-th best maximum of disjoint parts."""
    if not 0 < top_k <= len(logits_v) // _PART:
        return np.float32(-math.inf)
    maxima = np.maximum.reduceat(logits_v, np.arange(0, len(logits_v), _PART))
    return np.partition(maxima, -top_k)[-top_k]


def _weights(logits: Logits, best: np.float32, scale: np.float32) -> npt.NDArray[np.int64]:
    """Probabilities as multiples of 2^-30 of the best one."""
    with np.errstate(over="ignore"):  # a tiny temperature sends every other logit to -inf, which is what it means
        x = np.maximum((logits - best) * scale, np.float32(-40))
    whole = np.rint(x)
    x -= whole
    y = np.full_like(x, _EXP2[0])
    for coefficient in _EXP2[1:]:
        y *= x
        y += np.float32(coefficient)
    return np.rint(np.ldexp(y, whole.astype(np.int32) + _WEIGHT_BITS)).astype(np.int64)
