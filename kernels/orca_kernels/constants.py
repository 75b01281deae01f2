"""Launch constants of the kernels in the Triton language, by architecture (80: compute capability 8.0) and shape.

Tables and no autotuning: tuning synchronizes, times at the first call of a shape (while serving), cannot run inside a
CUDA graph, and lets a result depend on what was measured. Every entry is compiled ahead of time by the tests, which
refuse spilled registers and more shared memory than the architecture has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ARCHITECTURES = (80, 90, 100)

# Bytes of shared memory that one program may use. Consumer cards, which share the constants of 80, have 99 KiB.
SHARED_MEMORY = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass(frozen=True)
class LaunchConstants:
    """What every kernel has: warps per program, iterations of its loop in flight, fused multiply-add or not."""

    num_warps: int
    num_stages: int = 1
    fp_fusion: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of a launch. Fused multiply-add is pinned: its default differs between releases of Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fp_fusion}


# Warps of a norm, by the longest row that they hold in registers.
NORM_WARPS = ((2048, 4), (8192, 8), (16384, 16), (32768, 32))


@dataclass(frozen=True)
class LinearConstants(LaunchConstants):
    """Tile of a product: tokens, outputs, and inputs at a time; programs per multiprocessor that splitting aims at."""

    block_t: int = 16
    block_m: int = 64
    block_n: int = 128
    programs: int = 2


LINEAR_TOKENS = (16, 32, 64)  # up to so many tokens a tile of a product has


def linear_constants(architecture: int, tokens: int, itemsize: int, *, deterministic: bool = False) -> LinearConstants:
    """Constants of a product with a weight of `itemsize` bytes per value.

    A deterministic product has one tile whatever the number of tokens, because another may add in another order.
    """
    if deterministic:
        return LinearConstants(num_warps=4, num_stages=3, block_t=64, block_m=64, block_n=128 if itemsize == 1 else 64)
    block_t = next((size for size in LINEAR_TOKENS if tokens <= size), LINEAR_TOKENS[-1])
    # With 4 warps the compiler spills registers of the 4-bit kernel on architecture 100.
    return LinearConstants(num_warps=8 if architecture == 100 else 4, num_stages=4, block_t=block_t)


HEAD_SIZES = (64, 80, 96, 128, 256)
Phase = Literal["prefill", "decode"]  # decode: every row has one query token


@dataclass(frozen=True, kw_only=True)
class AttentionConstants(LaunchConstants):
    """`block_m`: query tokens times query heads of a K/V head in one program; `tile`: keys per step."""

    block_m: int
    tile: int


def _attention(num_warps: int, num_stages: int, block_m: int, tile: int) -> AttentionConstants:
    return AttentionConstants(num_warps=num_warps, num_stages=num_stages, block_m=block_m, tile=tile)


# By architecture, head size (the next power of 2) and phase.
ATTENTION: dict[tuple[int, int, Phase], AttentionConstants] = {
    (80, 64, "prefill"): _attention(8, 3, 128, 64),
    (80, 64, "decode"): _attention(4, 3, 16, 64),
    (80, 128, "prefill"): _attention(8, 3, 128, 32),
    (80, 128, "decode"): _attention(4, 3, 16, 64),
    (80, 256, "prefill"): _attention(8, 2, 64, 32),
    (80, 256, "decode"): _attention(4, 3, 16, 32),
    (90, 64, "prefill"): _attention(8, 3, 128, 64),
    (90, 64, "decode"): _attention(4, 3, 16, 64),
    (90, 128, "prefill"): _attention(8, 2, 128, 64),
    (90, 128, "decode"): _attention(4, 3, 16, 64),
    (90, 256, "prefill"): _attention(8, 2, 64, 32),
    (90, 256, "decode"): _attention(4, 3, 16, 32),
    (100, 64, "prefill"): _attention(8, 3, 128, 64),
    (100, 64, "decode"): _attention(4, 3, 16, 64),
    (100, 128, "prefill"): _attention(8, 2, 128, 64),
    (100, 128, "decode"): _attention(4, 3, 16, 64),
    (100, 256, "prefill"): _attention(8, 2, 64, 64),
    (100, 256, "decode"): _attention(4, 3, 16, 32),
}
ATTENTION_REDUCE = LaunchConstants(num_warps=4)
MAX_SEGMENTS = 16


def attention_segments(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Parts into which the keys of each of `rows` decode rows are split, so that every multiprocessor has two programs.

    Depends on the padded batch only, not on lengths: a captured graph keeps its grid. A power of 2, at most 16.
    """
    segments = 1
    while segments < MAX_SEGMENTS and rows * kv_heads * segments < 2 * multiprocessors:
        segments *= 2
    return segments
