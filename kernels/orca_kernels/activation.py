"""Activations of the feed-forward layer."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from orca_kernels import dispatch


def swiglu(gate_up_tn: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the packed projection [t, gate | up]: [t, 2m] to [t, m]."""
    if dispatch.use_triton(gate_up_tn):
        from orca_kernels.gpu import activation

        return activation.swiglu(gate_up_tn)
    gate, up = gate_up_tn.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu(x_tn: torch.Tensor, approximate: Literal["none", "tanh"]) -> torch.Tensor:
    """GeLU of [t, n]: exact (erf) with "none", GPT-2's `gelu_new` with "tanh"."""
    if dispatch.use_triton(x_tn):
        from orca_kernels.gpu import activation

        return activation.gelu(x_tn, tanh=approximate == "tanh")
    return F.gelu(x_tn, approximate=approximate)
