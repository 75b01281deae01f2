"""From the fused projection to attention: bias, norms of queries and keys, rotary embedding, and the K/V write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orca_kernels.dispatch import use_triton
from orca_kernels.kv_write import kv_write
from orca_kernels.rope import apply_rope


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of every query and every key head by itself: one weight [d] for queries, one for keys."""

    q_weight_d: torch.Tensor
    k_weight_d: torch.Tensor
    eps: float


def rope_and_write(
    qkv_tn: torch.Tensor,
    k_cache_skd: torch.Tensor,
    v_cache_skd: torch.Tensor,
    slot_mapping_t: torch.Tensor,
    *,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias_n: torch.Tensor | None = None,
    norm: HeadNorm | None = None,
    k_scale_sk: torch.Tensor | None = None,
    v_scale_sk: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the keys and values of [t, n = (h + 2k) * d] (all query heads, all key heads, all value heads) in the pool.

    Returns the queries, [t, h, d]. In this order, float32 inside and rounded once: bias, norm, `rope` (`rope_cos_sin`).
    Slots and scales as in `kv_write`; d is the head size of the caches.
    """
    if use_triton(qkv_tn):
        from orca_kernels.gpu import qkv

        return qkv.rope_and_write(
            qkv_tn, k_cache_skd, v_cache_skd, slot_mapping_t, rope, bias_n, norm, k_scale_sk, v_scale_sk
        )
    kv_heads, dim = k_cache_skd.shape[1:]
    x_tn = qkv_tn.float() if bias_n is None else qkv_tn.float() + bias_n.float()
    x_thd = x_tn.view(len(qkv_tn), -1, dim)
    q, k, v = x_thd.split((x_thd.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norm is not None:
        q, k = (
            x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps) * weight_d.float()
            for x, weight_d in ((q, norm.q_weight_d), (k, norm.k_weight_d))
        )
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    if k_scale_sk is None:
        k, v = k.to(k_cache_skd.dtype), v.to(v_cache_skd.dtype)
    kv_write(k, v, k_cache_skd, v_cache_skd, slot_mapping_t, k_scale_sk, v_scale_sk)
    return q.to(qkv_tn.dtype)
