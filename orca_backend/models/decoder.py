"""The decoder: one forward pass over the flat tokens of one iteration, for every model family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import orca_kernels
from orca_backend.models.layers import DecoderLayer, Linear, Norm, rope_inverse_frequencies
from orca_backend.models.spec import ModelSpec
from orca_kernels import AttentionMetadata
from orca_kernels.linear import QuantizedWeight

if TYPE_CHECKING:
    from orca_backend.engine.attention_kv import AttentionKV


class Decoder(nn.Module):
    """A decoder-only Transformer built from its spec. Made by `load_decoder`; parameters need no gradients."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        vocabulary = (spec.vocab_size, spec.hidden_size)
        self.spec = spec
        self.embedding = nn.Parameter(torch.empty(vocabulary), requires_grad=False)
        self.position_embedding: nn.Parameter | None = None
        if spec.rope is None:
            shape = (spec.max_positions, spec.hidden_size)
            self.position_embedding = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.num_layers))
        self.norm = Norm(spec)
        self.head: nn.Parameter | None = None  # None: tied to the embedding
        if not spec.tie_embeddings:
            self.head = nn.Parameter(torch.empty(vocabulary), requires_grad=False)
        self.inverse_frequencies: torch.Tensor | None = None

    def place(self, device: torch.device | str) -> None:
        """Make what is computed rather than loaded: the RoPE frequencies, float32 whatever the weights are."""
        if self.spec.rope is not None:
            self.inverse_frequencies = rope_inverse_frequencies(self.spec.rope, self.spec.head_dim).to(device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        kv: AttentionKV,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run `token_ids` (int64 [t], all rows flat), write their K/V, and return logits, float32 [r, vocabulary].

        `logits_rows` (int64 [r]) are the flat indices that are wanted: only they go through the last norm and the head.
        """
        x_th = self.embedding[token_ids]
        if self.position_embedding is not None:
            x_th += self.position_embedding[metadata.positions]
        rope = None
        if self.inverse_frequencies is not None:
            rope = orca_kernels.rope_cos_sin(metadata.positions, self.inverse_frequencies)
        residual_th: torch.Tensor | None = None
        for layer, layer_kv in zip(self.layers, kv.layers, strict=True):
            x_th, residual_th = layer(x_th, residual_th, rope, metadata, layer_kv)
        assert residual_th is not None
        x_rh = self.norm(x_th[logits_rows], residual_th[logits_rows])
        return orca_kernels.linear(x_rh, self.embedding if self.head is None else self.head).float()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        parameters = sum(parameter.nbytes for parameter in self.parameters())
        return parameters + sum(weight.num_bytes for weight in self.compressed)

    @property
    def compressed(self) -> list[QuantizedWeight]:
        """Weights that are kept in 8 or 4 bits: those of all projections of the layers, or none."""
        linears = (module for module in self.modules() if isinstance(module, Linear))
        return [linear.weight for linear in linears if isinstance(linear.weight, QuantizedWeight)]
