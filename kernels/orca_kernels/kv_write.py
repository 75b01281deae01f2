"""Store the keys and values of this iteration's tokens in the K/V pool of one layer."""

from __future__ import annotations

import torch

# The largest number that a quantized key or value may be, by the dtype of the pool.
QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_kv(x_tkd: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values in int8 or float8_e4m3fn, and the scale of each token and head: [t, k, d] and float32 [t, k].

    The largest of a head becomes the largest number of `dtype`; int8 rounds half to even. A head of zeros has scale 0.
    """
    limit = QUANTIZED_MAX[dtype]
    scale_tk = x_tkd.float().abs().amax(dim=-1) / limit
    quantized = x_tkd.float() / torch.where(scale_tk == 0, 1.0, scale_tk)[:, :, None]
    if dtype == torch.int8:
        quantized = quantized.round()
    return quantized.clamp(-limit, limit).to(dtype), scale_tk


def kv_write(
    k_tkd: torch.Tensor,
    v_tkd: torch.Tensor,
    k_cache_skd: torch.Tensor,
    v_cache_skd: torch.Tensor,
    slot_mapping_t: torch.Tensor,
    k_scale_sk: torch.Tensor | None = None,
    v_scale_sk: torch.Tensor | None = None,
) -> None:
    """Write token i to slot `slot_mapping_t[i]` (int64, distinct, below s; negative: nowhere), in place.

    A pool in int8 or float8_e4m3fn has scales, float32 [s, k] each. Raises IndexError for a slot beyond the pool.
    """
    written = slot_mapping_t >= 0
    if not written.all():
        k_tkd, v_tkd, slot_mapping_t = k_tkd[written], v_tkd[written], slot_mapping_t[written]
    for x_tkd, cache_skd, scale_sk in ((k_tkd, k_cache_skd, k_scale_sk), (v_tkd, v_cache_skd, v_scale_sk)):
        if scale_sk is not None:
            x_tkd, scale_tk = quantize_kv(x_tkd, cache_skd.dtype)
            scale_sk.index_copy_(0, slot_mapping_t, scale_tk)
        # float8 has no index_copy_; its bytes do.
        bits = torch.uint8 if cache_skd.dtype == torch.float8_e4m3fn else cache_skd.dtype
        cache_skd.view(bits).index_copy_(0, slot_mapping_t, x_tkd.view(bits))
