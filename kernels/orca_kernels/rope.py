"""Rotary position embedding, half-split layout (dimension i turns with i + d/2), as Llama checkpoints have it."""

from __future__ import annotations

import torch


def rope_cos_sin(positions_t: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [t, 1, d/2], of `positions_t` times `inv_freq` [d/2]; once per iteration."""
    angles = positions_t.float()[:, None, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(x_thd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head of [t, h, d] by its token's angles (`rope_cos_sin`); float32 inside, rounded once at the end."""
    first, second = x_thd.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_thd.dtype)
