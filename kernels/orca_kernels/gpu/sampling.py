"""Sampling in the Triton language, all rows of an iteration at once; the specification is `orca_kernels.sampling`.

Legend: R = rows, V = vocabulary size, S = sequences that have state on the device, T = tiles of the vocabulary.

Three launches, whatever the rows ask for: `scan_kernel` and `mass_kernel` go over the vocabulary in parallel tiles,
`choose_kernel` ends each row. No sort: candidates near the best logit are compacted in the order of their ids, and the
thresholds of top_k and top_p are found among them by bisection. Probabilities are whole numbers as in the
specification, and multiplications are not fused with additions: a seed draws the same token as on a CPU, always.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from orca_kernels.aot import Launch
from orca_kernels.constants import LaunchConstants
from orca_kernels.gpu import sampler_table
from orca_kernels.gpu.sampler_table import SamplerTable

_GREEDY, _PENALIZED = tl.constexpr(sampler_table.GREEDY), tl.constexpr(sampler_table.PENALIZED)
_PROMPT, _STOP = tl.constexpr(sampler_table.PROMPT), tl.constexpr(sampler_table.STOP)
_COUNT = tl.constexpr(sampler_table.STOP - 1)
_NEAR = tl.constexpr(0.2)  # parts of the reach (how far below the best there is any weight) to look for candidates in
_FAR = tl.constexpr(0.5)

BLOCK = 2048  # of the vocabulary, per program or step
_CONSTANTS = LaunchConstants(num_warps=8, fp_fusion=False)


@triton.jit
def scan_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    reals_ptr,
    integers_ptr,
    marks_ptr,
    work_ptr,
    tile_best_ptr,
    tile_raw_ptr,
    v,
    stride,
    BLOCK: tl.constexpr,
):
    """Of one tile: the logits as the row's penalties and bans leave them (to `work` [R, V], float32) and their best,
    and maximum and sum of exponentials of the raw ones (`tile_raw` [R, T, 2]).

    A best of NaN says that some logit is NaN or +inf.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    inside = columns < v
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    bad = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
    raw_best = tl.max(x, axis=0)
    shift = tl.where(raw_best > float("-inf"), raw_best, 0.0)
    out = (row.to(tl.int64) * tl.num_programs(1) + tile) * 2
    tl.store(tile_raw_ptr + out, raw_best)
    tl.store(tile_raw_ptr + out + 1, tl.sum(tl.exp(x - shift), axis=0))
    flags = tl.load(integers_ptr + slot * 4 + 3)
    banned = tl.load(positions_ptr + row) < tl.load(integers_ptr + slot * 4 + 2)
    penalized = (flags & _PENALIZED) != 0
    if penalized or banned:
        repetition = tl.load(reals_ptr + slot * 7 + 4)
        presence = tl.load(reals_ptr + slot * 7 + 5)
        frequency = tl.load(reals_ptr + slot * 7 + 6)
        marks = tl.load(marks_ptr + slot * v + columns, mask=inside, other=0)
        count = marks & _COUNT
        seen = (count > 0) | ((marks & _PROMPT) != 0)
        punished = x.to(tl.float64)
        punished = tl.where(x > 0, punished / repetition, punished * repetition)
        punished -= frequency * count.to(tl.float64) + tl.where(count > 0, presence, 0.0)
        x = tl.where(seen & penalized, punished.to(tl.float32), x)
        x = tl.where(((marks & _STOP) != 0) & banned, float("-inf"), x)
    x = tl.where(x == 0.0, 0.0, x)  # without the sign of -0.0, which would order it below 0.0
    tl.store(work_ptr + row.to(tl.int64) * v + columns, x, mask=inside)
    best = tl.max(x, axis=0)
    tl.store(tile_best_ptr + row * tl.num_programs(1) + tile, tl.where(bad, float("nan"), best))


@triton.jit
def _row_best(tile_best_ptr, row, tiles, TILES: tl.constexpr):
    """The best logit of a row, or NaN if it has none that is finite or one that is not a number."""
    index = tl.arange(0, TILES)
    bests = tl.load(tile_best_ptr + row * tiles + index, mask=index < tiles, other=float("-inf"))
    bad = tl.sum((bests != bests).to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(bests == bests, bests, float("-inf")), axis=0)
    return tl.where(bad | (best == float("-inf")), float("nan"), best), bests


@triton.jit
def _floors(reals_ptr, slot, best):
    """The least logit that min_p keeps and that has any weight; floors of what is far from, and near, the best."""
    reach = tl.load(reals_ptr + slot * 7 + 2).to(tl.float32)
    base = tl.maximum(best + tl.load(reals_ptr + slot * 7 + 3).to(tl.float32), best - reach)
    return base, tl.maximum(base, best - reach * _FAR), tl.maximum(base, best - reach * _NEAR)


@triton.jit
def _weights(x, best, scale):
    """Probabilities as multiples of 2^-30 of the best one, int64, by the same float32 operations as in NumPy."""
    z = tl.maximum((x - best) * scale, -40.0)
    whole = (z + 12582912.0) - 12582912.0  # 1.5 * 2^23 leaves no room for a fraction: rounds half to even
    z -= whole
    y = z * 1.54035304e-4 + 1.33335581e-3
    y = y * z + 9.61812911e-3
    y = y * z + 5.55041087e-2
    y = y * z + 2.40226507e-1
    y = y * z + 6.93147181e-1
    y = y * z + 1.0
    y *= ((whole.to(tl.int32) + (127 + 30)) << 23).to(tl.float32, bitcast=True)
    return tl.where(y < 4194304.0, (y + 12582912.0) - 12582912.0, y).to(tl.int64)


@triton.jit
def mass_kernel(
    slots_ptr, reals_ptr, integers_ptr, work_ptr, tile_best_ptr, tile_mass_ptr, v,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Of one tile: the weights, all of them, those far from the best and those near, summed; and how many are far and
    near: `tile_mass`, int64 [R, T, 5].
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    if (tl.load(integers_ptr + slot * 4 + 3) & _GREEDY) != 0:
        return
    best, _ = _row_best(tile_best_ptr, row, tl.num_programs(1), TILES)
    base, far, near = _floors(reals_ptr, slot, best)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(work_ptr + row.to(tl.int64) * v + columns, mask=columns < v, other=float("-inf"))
    weights = _weights(x, best, tl.load(reals_ptr + slot * 7).to(tl.float32))
    out = (row.to(tl.int64) * tl.num_programs(1) + tile) * 5
    tl.store(tile_mass_ptr + out, tl.sum(tl.where(x >= base, weights, 0), axis=0))
    tl.store(tile_mass_ptr + out + 1, tl.sum(tl.where(x >= far, weights, 0), axis=0))
    tl.store(tile_mass_ptr + out + 2, tl.sum(tl.where(x >= near, weights, 0), axis=0))
    tl.store(tile_mass_ptr + out + 3, tl.sum((x >= far).to(tl.int64), axis=0))
    tl.store(tile_mass_ptr + out + 4, tl.sum((x >= near).to(tl.int64), axis=0))


@triton.jit
def _uniform(seed, position):
    """The noise of `orca_kernels.sampling.uniform` in multiples of 2^-64 (the last 11 bits are 0), uint64."""
    x = seed.to(tl.uint64)
    for step in tl.static_range(2):
        if step == 0:
            x += 0x9E3779B97F4A7C15
        else:
            x += (position + 1).to(tl.uint64) * 0xD1342543DE82EF95
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x ^= x >> 31
    return (x >> 11) << 11


@triton.jit
def _ordered(x):
    """Integers (int64) in the order of the float32 `x`, one apart where those are neighbours."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _target(noise, total):
    """The product, rounded down; `noise` in multiples of 2^-64."""
    return tl.umulhi(noise, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def _pass(weights, target):
    """The index at which the running sum of `weights` passes `target`."""
    return tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)


@triton.jit
def _above(values_ptr, count, best, scale, least_key, least_weight, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates (COUNT), or how much weight, have an ordered value and a weight of at least these."""
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(values_ptr + index, mask=index < count, other=float("-inf"))
        weights = _weights(x, best, scale)
        keep = (index < count) & (_ordered(x) >= least_key) & (weights >= least_weight)
        total += tl.sum(tl.where(keep, 1 if COUNT else weights, 0).to(tl.int64), axis=0)
    return total


@triton.jit
def _draw_filtered(
    work_ptr, ids_ptr, floor, total, best, scale, noise, top_k, top_p, v, BLOCK: tl.constexpr,
):  # fmt: skip
    """A draw from what top_k, then top_p leave of the logits of at least `floor`, which hold all that these can keep.

    `total`: the weight of all that min_p keeps. Overwrites the row with its candidates.
    """
    count = tl.zeros((), dtype=tl.int32)
    for start in range(0, v, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(work_ptr + index, mask=index < v, other=float("-inf"))
        keep = (index < v) & (x >= floor)
        # The running count comes only after every thread has loaded, and never points ahead of what was loaded.
        target = count + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(work_ptr + target, x, mask=keep)
        tl.store(ids_ptr + target, index, mask=keep)
        count += tl.sum(keep.to(tl.int32), axis=0)
        tl.debug_barrier()
    least_key = tl.full((), -(1 << 31), dtype=tl.int64)
    if (top_k > 0) & (top_k < count):
        above = _ordered(best) + 1
        while above - least_key > 1:
            middle = (above + least_key) >> 1
            if _above(work_ptr, count, best, scale, middle, 0, True, BLOCK) >= top_k:
                least_key = middle
            else:
                above = middle
    least_weight = tl.zeros((), dtype=tl.int64)
    if top_p < 1.0:
        if top_k > 0:
            total = _above(work_ptr, count, best, scale, least_key, 0, False, BLOCK)
        wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        above = tl.full((), (1 << 30) + 1, dtype=tl.int64)
        while above - least_weight > 1:
            middle = (above + least_weight) >> 1
            if _above(work_ptr, count, best, scale, least_key, middle, False, BLOCK) >= wanted:
                least_weight = middle
            else:
                above = middle
    target = _target(noise, _above(work_ptr, count, best, scale, least_key, least_weight, False, BLOCK))
    token = tl.zeros((), dtype=tl.int32)
    before = tl.zeros((), dtype=tl.int64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(work_ptr + index, mask=index < count, other=float("-inf"))
        weights = _weights(x, best, scale)
        keep = (index < count) & (_ordered(x) >= least_key) & (weights >= least_weight)
        weights = tl.where(keep, weights, 0)
        mass = tl.sum(weights, axis=0)
        if (before <= target) & (before + mass > target):
            token = tl.load(ids_ptr + start + _pass(weights, target - before))
        before += mass
    return token


@triton.jit
def choose_kernel(
    logits_ptr, slots_ptr, positions_ptr, reals_ptr, integers_ptr, marks_ptr, last_tokens_ptr, work_ptr, ids_ptr,
    tile_best_ptr, tile_raw_ptr, tile_mass_ptr, tokens_ptr, log_probabilities_ptr, v, stride, tiles,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One row: its token (-1 if its logits are not finite), the log-probability of that among the raw logits, and what
    the next iteration needs: the occurrence counted, and the token as the sequence's last.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    best, bests = _row_best(tile_best_ptr, row, tiles, TILES)
    flags = tl.load(integers_ptr + slot * 4 + 3)
    index = tl.arange(0, TILES)
    columns = tl.arange(0, BLOCK)
    token = tl.full((), -1, dtype=tl.int32)
    if best == best:
        if (flags & _GREEDY) != 0:
            first = tl.argmax(bests, axis=0) * BLOCK
            x = tl.load(work_ptr + row * v + first + columns, mask=first + columns < v, other=float("-inf"))
            token = first + tl.argmax(x, axis=0)
        else:
            scale = tl.load(reals_ptr + slot * 7).to(tl.float32)
            top_p = tl.load(reals_ptr + slot * 7 + 1)
            top_k = tl.load(integers_ptr + slot * 4 + 1)
            noise = _uniform(tl.load(integers_ptr + slot * 4), tl.load(positions_ptr + row))
            floor, far, near = _floors(reals_ptr, slot, best)
            sums = tile_mass_ptr + (row * tiles + index) * 5
            mass = tl.load(sums, mask=index < tiles, other=0)
            total = tl.sum(mass, axis=0)
            if (top_k <= 0) & (top_p >= 1.0):
                target = _target(noise, total)
                tile = _pass(mass, target)
                target -= tl.sum(tl.where(index < tile, mass, 0), axis=0)
                first = tile * BLOCK
                x = tl.load(work_ptr + row * v + first + columns, mask=first + columns < v, other=float("-inf"))
                token = first + _pass(tl.where(x >= floor, _weights(x, best, scale), 0), target)
            else:
                # What lies above a floor holds the top k if it has k members, and the nucleus if it has enough weight.
                for part in tl.static_range(2):
                    enough = tl.sum(tl.load(sums + 3 + part, mask=index < tiles, other=0), axis=0) >= top_k
                    if top_k <= 0:
                        nucleus = tl.sum(tl.load(sums + 1 + part, mask=index < tiles, other=0), axis=0)
                        enough = nucleus.to(tl.float64) >= tl.ceil(top_p * total.to(tl.float64))
                    floor = tl.where(enough, near if part else far, floor)
                token = _draw_filtered(
                    work_ptr + row * v, ids_ptr + row * v, floor, total, best, scale, noise, top_k, top_p, v, BLOCK
                )
        if (flags & _PENALIZED) != 0:
            mark = marks_ptr + slot * v + token
            tl.store(mark, tl.load(mark) + 1)
        raw = tile_raw_ptr + (row * tiles + index) * 2
        raw_bests = tl.load(raw, mask=index < tiles, other=float("-inf"))
        raw_best = tl.max(raw_bests, axis=0)
        exponentials = tl.load(raw + 1, mask=index < tiles, other=0.0) * tl.exp(raw_bests - raw_best)
        chosen = tl.load(logits_ptr + row * stride + token).to(tl.float32)
        tl.store(log_probabilities_ptr + row, chosen - raw_best - tl.log(tl.sum(exponentials, axis=0)))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(last_tokens_ptr + slot, tl.maximum(token, 0).to(tl.int64))  # a failed row may be in flight once more


def sample(
    logits_rv: torch.Tensor, slots_r: torch.Tensor, positions_r: torch.Tensor, table: SamplerTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int64 [R], and their log-probabilities among the logits as they are, float32 [R]; updates `table`.

    `logits_rv` [R, V] (any float type, rows contiguous, unchanged); `slots_r` int32 [R], -1 for a row that is padding
    (its outputs are undefined); `positions_r` int64 [R], of the token to choose in its sequence. Rows whose logits
    have no finite maximum get token -1.
    """
    rows, v = logits_rv.shape
    tiles = triton.cdiv(v, BLOCK)
    padded = _padded_tiles(v)
    new = logits_rv.new_empty
    work, ids = new(rows, v, dtype=torch.float32), new(rows, v, dtype=torch.int32)
    tile_best, tile_raw = new(rows, tiles, dtype=torch.float32), new(rows, tiles, 2, dtype=torch.float32)
    tile_mass = new(rows, tiles, 5, dtype=torch.int64)
    tokens, log_probabilities = new(rows, dtype=torch.int64), new(rows, dtype=torch.float32)
    options = _CONSTANTS.options
    reals, integers, marks = table.reals, table.integers, table.marks
    stride = logits_rv.stride(0)
    scan_kernel[(rows, tiles)](
        logits_rv, slots_r, positions_r, reals, integers, marks, work, tile_best, tile_raw, v, stride,
        BLOCK=BLOCK, **options,
    )  # fmt: skip
    mass_kernel[(rows, tiles)](
        slots_r, reals, integers, work, tile_best, tile_mass, v, BLOCK=BLOCK, TILES=padded, **options
    )
    choose_kernel[(rows,)](
        logits_rv, slots_r, positions_r, reals, integers, marks, table.last_tokens, work, ids, tile_best, tile_raw,
        tile_mass, tokens, log_probabilities, v, stride, tiles, BLOCK=BLOCK, TILES=padded, **options,
    )  # fmt: skip
    return tokens, log_probabilities


def top_log_probabilities(logits_rv: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n` largest log-probabilities of each row, float32 [R, n], descending, and their token ids, int64 [R, n]."""
    logits = logits_rv.float()
    values, ids = logits.topk(n, dim=-1)
    return values - logits.logsumexp(dim=-1, keepdim=True), ids


def _padded_tiles(v: int) -> int:
    """A power of 2; with fewer than 64 the compiler spills registers on architecture 90."""
    return max(64, triton.next_power_of_2(triton.cdiv(v, BLOCK)))


def launches(architecture: int) -> Iterator[Launch]:
    """The three passes at vocabularies of 50,257 and 128,256."""
    names = {
        "logits_ptr": "*fp32:16", "slots_ptr": "*i32:16", "positions_ptr": "*i64:16", "reals_ptr": "*fp64:16",
        "integers_ptr": "*i64:16", "marks_ptr": "*i32:16", "last_tokens_ptr": "*i64:16", "work_ptr": "*fp32:16",
        "ids_ptr": "*i32:16", "tile_best_ptr": "*fp32:16", "tile_raw_ptr": "*fp32:16", "tile_mass_ptr": "*i64:16",
        "tokens_ptr": "*i64:16", "log_probabilities_ptr": "*fp32:16", "tiles": "i32",
    }  # fmt: skip
    for vocabulary in (50257, 128256):
        size = "i32:16" if vocabulary % 16 == 0 else "i32"
        arguments: dict[str, Any] = {
            **names,
            "v": size,
            "stride": size,
            "BLOCK": BLOCK,
            "TILES": _padded_tiles(vocabulary),
        }
        for kernel in (scan_kernel, mass_kernel, choose_kernel):
            yield Launch(f"sampling {kernel.__name__} V={vocabulary}", kernel, arguments, _CONSTANTS)
