"""The pieces of the decoder: projections, norms, attention and feed-forward, each built from the spec.

Non-attention operators see one flat tensor x_th [tokens of the iteration, hidden] and know no rows; only Attention is
told by the metadata where rows begin and end (selective batching, Orca section 3).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

import orca_kernels
from orca_backend.models.spec import ModelSpec, RopeSpec
from orca_kernels import AttentionMetadata
from orca_kernels.linear import QuantizedWeight, WeightKind, quantize_weight

if TYPE_CHECKING:
    from orca_backend.engine.attention_kv import LayerKV

RopeAngles = tuple[torch.Tensor, torch.Tensor]


def rope_inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Angle per position of each dimension pair, float32 [head_dim / 2], scaled as the checkpoint says."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        # Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated.
        turns = rope.original_max_positions * inv_freq / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return keep * inv_freq + (1.0 - keep) * inv_freq / rope.factor
    return inv_freq


class Linear(nn.Module):
    """A projection. `weight` is [out, in]."""

    weight: nn.Parameter | QuantizedWeight

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[t, in] to [t, out]."""
        return orca_kernels.linear(x, self.weight, self.bias)

    def compress(self, weight_mn: torch.Tensor, kind: WeightKind) -> None:
        """Take `weight_mn`, [out, in], in 8 or 4 bits."""
        del self.weight  # a module keeps a parameter's name for parameters
        self.weight = quantize_weight(weight_mn, kind)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the hidden dimension, as the spec says."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.weight = nn.Parameter(torch.empty(spec.hidden_size), requires_grad=False)
        layer_norm = spec.norm == "layer"
        self.bias = nn.Parameter(torch.empty(spec.hidden_size), requires_grad=False) if layer_norm else None

    def forward(self, x_th: torch.Tensor, residual_th: torch.Tensor | None = None) -> torch.Tensor:
        """Of x, or with a residual of residual + x, which the residual then is: [t, h] to [t, h]."""
        if residual_th is None:
            if self.bias is None:
                return orca_kernels.rms_norm(x_th, self.weight, self.eps)
            return orca_kernels.layer_norm(x_th, self.weight, self.bias, self.eps)
        if self.bias is None:
            return orca_kernels.add_rms_norm(x_th, residual_th, self.weight, self.eps)
        return orca_kernels.add_layer_norm(x_th, residual_th, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Self-attention; rows of the fused projection `qkv`: all query heads, all key heads, all value heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.scale = spec.head_dim**-0.5
        outputs = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = Linear(spec.hidden_size, outputs, spec.qkv_bias)
        self.out = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, spec.out_bias)

    def forward(
        self,
        x_th: torch.Tensor,
        rope: RopeAngles | None,
        metadata: AttentionMetadata,
        kv: LayerKV,
    ) -> torch.Tensor:
        """[t, h] to [t, h]; writes this iteration's K/V into the pool."""
        qkv = orca_kernels.linear(x_th, self.qkv.weight)
        q = orca_kernels.rope_and_write(
            qkv,
            kv.keys,
            kv.values,
            metadata.slot_mapping,
            rope=rope,
            bias_n=self.qkv.bias,
            k_scale_sk=kv.key_scales,
            v_scale_sk=kv.value_scales,
        )
        context = orca_kernels.ragged_attention(
            q, kv.keys, kv.values, metadata, self.scale, k_scale_sk=kv.key_scales, v_scale_sk=kv.value_scales
        )
        return self.out(context.flatten(1))


class FeedForward(nn.Module):
    """Two projections with the activation between; with SwiGLU the first one is gate and up, packed."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        width = 2 * spec.intermediate_size if spec.activation == "swiglu" else spec.intermediate_size
        self.up = Linear(spec.hidden_size, width, spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias)

    def forward(self, x_th: torch.Tensor) -> torch.Tensor:
        """[t, h] to [t, h]."""
        x = self.up(x_th)
        if self.activation == "swiglu":
            return self.down(orca_kernels.swiglu(x))
        return self.down(orca_kernels.gelu(x, "tanh" if self.activation == "gelu_tanh" else "none"))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual by the norm that comes after it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = Norm(spec)
        self.attention = Attention(spec)
        self.mlp_norm = Norm(spec)
        self.mlp = FeedForward(spec)

    def forward(
        self,
        x_th: torch.Tensor,
        residual_th: torch.Tensor | None,
        rope: RopeAngles | None,
        metadata: AttentionMetadata,
        kv: LayerKV,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the feed-forward, [t, h], and the residual to which it has yet to be added, [t, h].

        `x_th` and `residual_th` are that of the layer before; of the first, the embeddings and None.
        """
        hidden = self.attention_norm(x_th, residual_th)
        residual_th = x_th if residual_th is None else residual_th
        hidden = self.attention(hidden, rope, metadata, kv)
        return self.mlp(self.mlp_norm(hidden, residual_th)), residual_th
