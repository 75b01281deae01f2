"""Dense projection of the flat token tensor, by a weight as it is or one kept in 8 or 4 bits.

Shapes: t tokens, n inputs, m outputs. Compressed weights save the reads that bound small batches; they are expanded
in the kernel (a few tokens) or once before an ordinary product (many).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from orca_kernels import dispatch

WeightKind = Literal["int8_weight", "int4_weight", "fp8_weight"]

GROUP = 32  # inputs that share scale and offset with 4 bits
PACK = 128  # inputs in a packed run of 4-bit weights: byte i holds input i (low) and input i + PACK / 2 (high)
FP8_MAX = 448.0

_FEW_TOKENS = 64  # up to here a product is bound by the weight's bytes, and expanding it in the kernel costs nothing


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight [m, n] in 8 or 4 bits.

    `values`: int8 [m, n]; the bits of float8_e4m3fn as uint8 [m, n]; or with 4 bits uint8 [m, n' / 2], where n' is n
    rounded up to PACK. `scales`, float32: [m], or with 4 bits [m, n' / GROUP]; `offsets` likewise, 4 bits only.
    """

    kind: WeightKind
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


def quantize_weight(weight_mn: torch.Tensor, kind: WeightKind) -> QuantizedWeight:
    """Round a weight: 8 bits with one scale per output; 4 bits from the least to the greatest weight of each group."""
    weight = weight_mn.float()
    outputs, inputs = weight.shape
    if kind == "int4_weight":
        # Padding repeats the last weight, so that it widens no group.
        padded = F.pad(weight[None], (0, -inputs % PACK), mode="replicate")[0].view(outputs, -1, GROUP)
        offset = padded.amin(dim=2, keepdim=True)
        scale = (padded.amax(dim=2, keepdim=True) - offset).clamp_(min=1e-30) / 15
        digits = ((padded - offset) / scale).round_().clamp_(0, 15).to(torch.uint8)
        low, high = digits.view(outputs, -1, 2, PACK // 2).unbind(2)
        packed = (low | high << 4).flatten(1).contiguous()
        return QuantizedWeight(kind, packed, scale.squeeze(2).contiguous(), offset.squeeze(2).contiguous(), inputs)
    largest = FP8_MAX if kind == "fp8_weight" else 127
    scale = weight.abs().amax(dim=1).clamp_(min=1e-30) / largest
    values = weight / scale[:, None]
    values = (
        values.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "fp8_weight" else values.round_().to(torch.int8)
    )
    return QuantizedWeight(kind, values, scale, None, inputs)


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [m, n] that the values stand for, rounded once to `dtype`: the specification of every kernel."""
    if weight.offsets is not None:
        runs = weight.values.view(weight.values.shape[0], -1, PACK // 2)
        digits = torch.stack([runs & 15, runs >> 4], dim=2).view(*weight.scales.shape, GROUP)
        values = digits * weight.scales[..., None] + weight.offsets[..., None]
        return values.flatten(1)[:, : weight.inputs].to(dtype)
    values = weight.values if weight.kind == "int8_weight" else weight.values.view(torch.float8_e4m3fn)
    return (values.float() * weight.scales[:, None]).to(dtype)


def linear(
    x_tn: torch.Tensor, weight_mn: torch.Tensor | QuantizedWeight, bias_m: torch.Tensor | None = None
) -> torch.Tensor:
    """Product x @ weight.T + bias: [t, n] and [m, n] to [t, m], in the dtype of `x_tn`.

    On a GPU: torch's (cuBLAS) for weights as they are and for many tokens, else the kernel in the Triton language. With
    `dispatch.deterministic()` always that kernel, with tiles that do not depend on t.
    """
    compressed = isinstance(weight_mn, QuantizedWeight)
    if dispatch.use_triton(x_tn) and (dispatch.deterministic() or (compressed and x_tn.shape[0] <= _FEW_TOKENS)):
        from orca_kernels.gpu import linear as gpu

        return gpu.linear(x_tn, weight_mn, bias_m, deterministic=dispatch.deterministic())
    if isinstance(weight_mn, QuantizedWeight):
        weight_mn = dequantize_weight(weight_mn, x_tn.dtype)
    return F.linear(x_tn, weight_mn, bias_m)
