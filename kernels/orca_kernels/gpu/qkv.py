"""Bias, norms of queries and keys, RoPE and the K/V write of one iteration's tokens in one launch.

A program has one token and some of its heads of all three kinds, as two halves [heads, d/2]: the pairs that RoPE turns.
Which kind a head is decides by masks what is done to it and where it goes, so one body serves all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from orca_kernels.aot import Launch
from orca_kernels.constants import HEAD_SIZES, LaunchConstants
from orca_kernels.kv_write import QUANTIZED_MAX

if TYPE_CHECKING:
    from orca_kernels.qkv import HeadNorm

BLOCK_HEADS = 8


@triton.jit
def rope_and_write_kernel(
    qkv,
    bias,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One token (grid axis 0), BLOCK_HEADS of its heads (axis 1). LIMIT: the largest quantized number, 0 for none."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_HALF)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < HALF)[None, :]
    place = head[:, None] * DIM + d[None, :]
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + place
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        first += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + place + HALF, mask=inside, other=0.0).to(tl.float32)
    if q_weight is not None:
        rstd = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        w_first = tl.where(
            is_q[:, None],
            tl.load(q_weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :],
            tl.load(k_weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :],
        )
        w_second = tl.where(
            is_q[:, None],
            tl.load(q_weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :],
            tl.load(k_weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :],
        )
        first = tl.where(is_v[:, None], first, first * rstd * w_first)
        second = tl.where(is_v[:, None], second, second * rstd * w_second)
    if cos is not None:
        c = tl.load(cos + token * HALF + d, mask=d < HALF, other=0.0)[None, :]
        s = tl.load(sin + token * HALF + d, mask=d < HALF, other=0.0)[None, :]
        turned = first * c - second * s
        second = tl.where(is_v[:, None], second, second * c + first * s)
        first = tl.where(is_v[:, None], first, turned)

    target = q + token * (HEADS * DIM) + place
    q_mask = inside & is_q[:, None]
    tl.store(target, first.to(q.dtype.element_ty), mask=q_mask)
    tl.store(target + HALF, second.to(q.dtype.element_ty), mask=q_mask)

    slot = tl.load(slots + token)
    k_mask = is_k & (slot >= 0)
    v_mask = is_v & (slot >= 0)
    k_head = slot * KV_HEADS + head - HEADS
    v_head = k_head - KV_HEADS
    if LIMIT > 0:
        scale = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)) / LIMIT
        tl.store(k_scale + k_head, scale, mask=k_mask)
        tl.store(v_scale + v_head, scale, mask=v_mask)
        divisor = tl.where(scale > 0, scale, 1.0)[:, None]
        first = tl.minimum(tl.maximum(first / divisor, -LIMIT), LIMIT)
        second = tl.minimum(tl.maximum(second / divisor, -LIMIT), LIMIT)
        if ROUND:  # half to even, on every device
            first = (first + 12582912.0) - 12582912.0
            second = (second + 12582912.0) - 12582912.0
    k_target = k_cache + k_head[:, None] * DIM + d[None, :]
    v_target = v_cache + v_head[:, None] * DIM + d[None, :]
    tl.store(k_target, first.to(k_cache.dtype.element_ty), mask=inside & k_mask[:, None])
    tl.store(k_target + HALF, second.to(k_cache.dtype.element_ty), mask=inside & k_mask[:, None])
    tl.store(v_target, first.to(v_cache.dtype.element_ty), mask=inside & v_mask[:, None])
    tl.store(v_target + HALF, second.to(v_cache.dtype.element_ty), mask=inside & v_mask[:, None])


def rope_and_write(
    qkv_tn: torch.Tensor,
    k_cache_skd: torch.Tensor,
    v_cache_skd: torch.Tensor,
    slot_mapping_t: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    bias_n: torch.Tensor | None,
    norm: HeadNorm | None,
    k_scale_sk: torch.Tensor | None,
    v_scale_sk: torch.Tensor | None,
) -> torch.Tensor:
    """As `orca_kernels.rope_and_write`; all tensors contiguous. Slots beyond the pool are not detected."""
    tokens, width = qkv_tn.shape
    kv_heads, dim = k_cache_skd.shape[1:]
    heads = width // dim - 2 * kv_heads
    q_thd = torch.empty(tokens, heads, dim, dtype=qkv_tn.dtype, device=qkv_tn.device)
    cos, sin = rope or (None, None)
    constants = _constants(dim)
    rope_and_write_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, BLOCK_HEADS))](
        qkv_tn,
        bias_n,
        norm and norm.q_weight_d,
        norm and norm.k_weight_d,
        cos,
        sin,
        slot_mapping_t,
        q_thd,
        k_cache_skd,
        v_cache_skd,
        k_scale_sk,
        v_scale_sk,
        norm.eps if norm else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(dim // 2),
        LIMIT=QUANTIZED_MAX.get(k_cache_skd.dtype, 0.0),
        ROUND=k_cache_skd.dtype == torch.int8,
        **constants.options,
    )
    return q_thd


def _constants(dim: int) -> LaunchConstants:
    return LaunchConstants(num_warps=max(1, BLOCK_HEADS * triton.next_power_of_2(dim) // 256))


def launches(architecture: int) -> Iterator[Launch]:
    """Every head size, plain and with everything, for each kind of pool."""
    for dim in HEAD_SIZES:
        for pool in ("bf16", "i8") if architecture < 89 else ("bf16", "i8", "fp8e4nv"):
            full = pool != "bf16"
            yield Launch(
                name=f"rope_and_write d={dim} {pool}",
                kernel=rope_and_write_kernel,
                arguments={
                    **dict.fromkeys(("qkv", "q"), "*bf16:16"),
                    **dict.fromkeys(("bias", "q_weight", "k_weight"), "*bf16:16" if full else None),
                    **dict.fromkeys(("cos", "sin"), "*fp32:16"),
                    "slots": "*i64:16",
                    **dict.fromkeys(("k_cache", "v_cache"), f"*{pool}:16"),
                    **dict.fromkeys(("k_scale", "v_scale"), "*fp32:16" if full else None),
                    "eps": "fp32",
                    "HEADS": 32,
                    "KV_HEADS": 8,
                    "DIM": dim,
                    "BLOCK_HEADS": BLOCK_HEADS,
                    "BLOCK_HALF": triton.next_power_of_2(dim // 2),
                    "LIMIT": {"bf16": 0.0, "i8": 127.0, "fp8e4nv": 448.0}[pool],
                    "ROUND": pool == "i8",
                },
                constants=_constants(dim),
                wide_loads=2,
            )
