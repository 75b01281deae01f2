"""Normalisation over the hidden dimension of the flat token tensor, alone or after the residual addition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from orca_kernels import dispatch


def rms_norm(x_tn: torch.Tensor, weight_n: torch.Tensor, eps: float, *, gemma: bool = False) -> torch.Tensor:
    """RMSNorm of [t, n], statistics in float32.

    The order of cast and weight matters in 16 bits. Llama rounds to the input dtype BEFORE the weight is applied; with
    `gemma` the factor is 1 + weight, all in float32, and rounded at the end.
    """
    if dispatch.use_triton(x_tn):
        from orca_kernels.gpu import norm

        return norm.norm(x_tn, weight_n, None, eps, gemma=gemma)
    x = x_tn.float()
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    if gemma:
        return (x * (1.0 + weight_n.float())).to(x_tn.dtype)
    return x.to(x_tn.dtype) * weight_n


def layer_norm(x_tn: torch.Tensor, weight_n: torch.Tensor, bias_n: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm of [t, n] with weight and bias."""
    if dispatch.use_triton(x_tn):
        from orca_kernels.gpu import norm

        return norm.norm(x_tn, weight_n, bias_n, eps)
    return F.layer_norm(x_tn, weight_n.shape, weight_n, bias_n, eps)


def add_rms_norm(
    x_tn: torch.Tensor, residual_tn: torch.Tensor, weight_n: torch.Tensor, eps: float, *, gemma: bool = False
) -> torch.Tensor:
    """Add x to `residual_tn` in place (contiguous [t, n]), then its `rms_norm`."""
    if dispatch.use_triton(x_tn):
        from orca_kernels.gpu import norm

        return norm.norm(x_tn, weight_n, None, eps, residual_tn=residual_tn, gemma=gemma)
    residual_tn += x_tn
    return rms_norm(residual_tn, weight_n, eps, gemma=gemma)


def add_layer_norm(
    x_tn: torch.Tensor, residual_tn: torch.Tensor, weight_n: torch.Tensor, bias_n: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to `residual_tn` in place (contiguous [t, n]), then its `layer_norm`."""
    if dispatch.use_triton(x_tn):
        from orca_kernels.gpu import norm

        return norm.norm(x_tn, weight_n, bias_n, eps, residual_tn=residual_tn)
    residual_tn += x_tn
    return layer_norm(residual_tn, weight_n, bias_n, eps)
