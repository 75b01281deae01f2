"""Ragged attention in the Triton language: prefill, chunk and decode rows of one iteration in one launch.

A program has BLOCK_Q query tokens of one row and all query heads of one K/V head, packed as rows of one matrix, so that
decode too fills the matrix unit and every key is read once per K/V head. It finds its row by binary search over the
cumulative query lengths (the grid is an upper bound that needs no look at the device), then goes once over the keys
with a running softmax (Dao, "FlashAttention-2", 2023). Few decode rows are split over their keys ("Flash-Decoding"):
programs then leave normalized partial results and their log-sum-exp, which a second kernel merges. The shape of the
whole follows vLLM's unified attention kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from orca_kernels import dispatch
from orca_kernels.aot import Launch
from orca_kernels.attention import AttentionMetadata
from orca_kernels.constants import (
    ATTENTION,
    ATTENTION_REDUCE,
    HEAD_SIZES,
    MAX_SEGMENTS,
    AttentionConstants,
    attention_segments,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_of(query_start_loc, block, num_rows, BLOCK_Q: tl.constexpr):
    """The row of query block `block`: row r has blocks from query_start_loc[r] // BLOCK_Q + r on."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def attention_kernel(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    out,
    lse,
    query_start_loc,
    seq_lens,
    block_table,
    num_rows,
    table_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
):
    """Grid: query blocks, K/V heads, segments. `scale` counts in powers of 2: it is the usual one times log2(e).

    WINDOW: keys that a token sees, 0 for all. K_DOT, V_DOT: what the two products compute in. With `lse`, `out` is
    float32 [t, h, segments, DIM] of partial results; without, there is one segment and `out` is [t, h, DIM].
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    segments = tl.num_programs(2)
    row = _row_of(query_start_loc, block, num_rows, BLOCK_Q)
    row_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - row_start
    first = (block - row_start // BLOCK_Q - row) * BLOCK_Q
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + row)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside_d = d < DIM
    token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = (token < query_len) & (m < BLOCK_Q * GROUP)
    position = seq_len - query_len + token
    q_row = (row_start + token).to(tl.int64) * HEADS + head
    q_md = tl.load(q + q_row[:, None] * DIM + d[None, :], mask=live[:, None] & inside_d[None, :], other=0.0).to(K_DOT)

    # Keys that some token of the block sees, in tiles that begin at multiples of TILE wherever the window begins.
    end = tl.minimum(seq_len, seq_len - query_len + first + BLOCK_Q)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, seq_len - query_len + first + 1 - WINDOW)
    first_tile = begin // TILE
    last_tile = tl.cdiv(end, TILE)
    if lse is not None:
        share = tl.cdiv(last_tile - first_tile, segments)
        first_tile += segment * share
        last_tile = tl.minimum(last_tile, first_tile + share)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    context = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(first_tile, last_tile):
        j = tile * TILE + tl.arange(0, TILE)
        real = (j >= begin) & (j < end)  # nothing else is read: unwritten slots may hold NaN, and 0 * NaN is NaN
        page = tl.load(block_table + row.to(tl.int64) * table_stride + j // PAGE, mask=real, other=0).to(tl.int64)
        entry = (page * PAGE + j % PAGE) * KV_HEADS + kv_head
        k_dt = tl.load(k_cache + entry[None, :] * DIM + d[:, None], mask=inside_d[:, None] & real[None, :], other=0.0)
        scores = tl.dot(q_md, k_dt.to(K_DOT), input_precision="ieee")
        if k_scale is not None:
            scores *= tl.load(k_scale + entry, mask=real, other=0.0)[None, :]
        scores *= scale
        if softcap is not None:
            # softcap * tanh(scores / softcap) with one exponential, which may overflow to infinity but not to NaN
            scores = softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))
        visible = real[None, :] & (j[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (j[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        origin = tl.where(better > float("-inf"), better, 0.0)  # of a row that has seen no key yet
        p = tl.exp2(scores - origin[:, None])
        fade = tl.exp2(best - origin)
        best = better
        total = total * fade + tl.sum(p, 1)
        v_td = tl.load(v_cache + entry[:, None] * DIM + d[None, :], mask=real[:, None] & inside_d[None, :], other=0.0)
        if v_scale is not None:
            p *= tl.load(v_scale + entry, mask=real, other=0.0)[None, :]
        context = tl.dot(p.to(V_DOT), v_td.to(V_DOT), context * fade[:, None], input_precision="ieee")

    total = tl.where(total > 0, total, 1.0)  # of a row that has seen no key, whose `best` still says so
    context /= total[:, None]
    store = live[:, None] & inside_d[None, :]
    if lse is None:
        tl.store(out + q_row[:, None] * DIM + d[None, :], context.to(out.dtype.element_ty), mask=store)
    else:
        part = q_row * segments + segment
        tl.store(lse + part, best + tl.log2(total), mask=live)
        tl.store(out + part[:, None] * DIM + d[None, :], context, mask=store & (best > float("-inf"))[:, None])


@triton.jit(do_not_specialize=["segments"])
def attention_reduce_kernel(
    parts, lse, out, segments, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENTS: tl.constexpr
):
    """Merge the segments of one token and head: their mean, weighted by the exponentials (base 2) of `lse`."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    d = tl.arange(0, BLOCK_D)
    weight = tl.load(lse + row * segments + segment, mask=segment < segments, other=float("-inf"))
    seen = weight > float("-inf")  # the others have left no result
    best = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(best > float("-inf"), best, 0.0))
    part = parts + (row * segments + segment)[:, None] * DIM + d[None, :]
    context = tl.sum(weight[:, None] * tl.load(part, mask=seen[:, None] & (d < DIM)[None, :], other=0.0), 0)
    total = tl.sum(weight, 0)
    context /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + d, context.to(out.dtype.element_ty), mask=d < DIM)


_DOT = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def ragged_attention(
    q_thd: torch.Tensor,
    k_cache_skd: torch.Tensor,
    v_cache_skd: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    k_scale_sk: torch.Tensor | None,
    v_scale_sk: torch.Tensor | None,
) -> torch.Tensor:
    """As `orca_kernels.ragged_attention`. A row of seq_len 0, the padding of a captured batch, gets zeros.

    Of the metadata only the tensors and the longest query are used: a graph that was captured with one token in every
    row can be replayed for any lengths. Raises TypeError for queries that are not float16 or bfloat16 on a GPU,
    ValueError for heads of more than 256.
    """
    tokens, heads, dim = q_thd.shape
    if dim > max(HEAD_SIZES):
        raise ValueError(f"head size {dim} is above {max(HEAD_SIZES)}")
    rows, kv_heads = len(metadata.seq_lens), k_cache_skd.shape[1]
    if dispatch.interpreted():
        k_dot = v_dot = tl.float32
    elif q_thd.dtype not in _DOT:
        raise TypeError(f"queries must be float16 or bfloat16, got {q_thd.dtype}")
    else:
        k_dot = _DOT[q_thd.dtype]
        # Quantized values are exact in bfloat16; probabilities times their scales may be too small for float16.
        v_dot = k_dot if v_scale_sk is None else tl.bfloat16
    architecture = dispatch.architecture(q_thd.device)
    decode = metadata.max_query_len == 1 and not dispatch.deterministic()
    block_d = _block_d(dim)
    constants = ATTENTION[architecture, block_d, "decode" if decode else "prefill"]
    segments = attention_segments(rows, kv_heads, dispatch.multiprocessors(q_thd.device)) if decode else 1
    block_m = _block_m(constants, heads // kv_heads)
    out = torch.empty_like(q_thd, memory_format=torch.contiguous_format)
    parts, lse = out, None
    if segments > 1:
        parts = torch.empty(tokens, heads, segments, dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(tokens, heads, segments, dtype=torch.float32, device=out.device)
    attention_kernel[(tokens // (block_m // (heads // kv_heads)) + rows, kv_heads, segments)](
        q_thd.contiguous(),
        k_cache_skd,
        v_cache_skd,
        k_scale_sk,
        v_scale_sk,
        parts,
        lse,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        rows,
        metadata.block_table.stride(0),
        scale * LOG2_E.value,
        softcap,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        TILE=constants.tile,
        PAGE=metadata.block_size,
        WINDOW=window or 0,
        K_DOT=k_dot,
        V_DOT=v_dot,
        **constants.options,
    )
    if lse is not None:
        attention_reduce_kernel[(tokens * heads,)](
            parts, lse, out, segments, DIM=dim, BLOCK_D=block_d, SEGMENTS=MAX_SEGMENTS, **ATTENTION_REDUCE.options
        )
    return out


def _block_d(dim: int) -> int:
    return max(HEAD_SIZES[0], triton.next_power_of_2(dim))


def _block_m(constants: AttentionConstants, group: int) -> int:
    return max(constants.block_m, triton.next_power_of_2(group))


def launches(architecture: int) -> Iterator[Launch]:
    """Every head size and phase, for each kind of pool; with window and soft cap where models have them (256)."""
    for dim in HEAD_SIZES:
        block_d = _block_d(dim)
        for phase in ("prefill", "decode"):
            for pool in ("bf16", "i8") if architecture < 89 else ("bf16", "i8", "fp8e4nv"):
                constants = ATTENTION[architecture, block_d, phase]
                quantized = pool != "bf16"
                split = phase == "decode"
                gemma = dim == 256
                yield Launch(
                    name=f"attention {phase} d={dim} {pool}",
                    kernel=attention_kernel,
                    arguments={
                        "q": "*bf16:16",
                        **dict.fromkeys(("k_cache", "v_cache"), f"*{pool}:16"),
                        **dict.fromkeys(("k_scale", "v_scale"), "*fp32:16" if quantized else None),
                        "out": "*fp32:16" if split else "*bf16:16",
                        "lse": "*fp32:16" if split else None,
                        **dict.fromkeys(("query_start_loc", "seq_lens", "block_table"), "*i32:16"),
                        **dict.fromkeys(("num_rows", "table_stride"), "i32"),
                        "scale": "fp32",
                        "softcap": "fp32" if gemma else None,
                        "HEADS": 32,
                        "KV_HEADS": 8,
                        "DIM": dim,
                        "BLOCK_D": block_d,
                        "BLOCK_M": _block_m(constants, 4),
                        "TILE": constants.tile,
                        "PAGE": 16,
                        "WINDOW": 4096 if gemma else 0,
                        **dict.fromkeys(("K_DOT", "V_DOT"), tl.bfloat16),
                    },
                    constants=constants,
                    uses_dot=True,
                    # all of a tile of keys and one of values, which is all that counts in decode
                    wide_loads=2 * constants.tile * block_d * (1 if quantized else 2) // (512 * constants.num_warps),
                )
        yield Launch(
            name=f"attention reduce d={dim}",
            kernel=attention_reduce_kernel,
            arguments={
                **dict.fromkeys(("parts", "lse"), "*fp32:16"),
                "out": "*bf16:16",
                "segments": "i32",
                "DIM": dim,
                "BLOCK_D": block_d,
                "SEGMENTS": MAX_SEGMENTS,
            },
            constants=ATTENTION_REDUCE,
        )
