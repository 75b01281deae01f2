"""A decoder as one compiled program for the CPU: the call and the answers of `Decoder`, without torch in between."""

from __future__ import annotations

import torch

from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.models.decoder import Decoder
from orca_backend.models.layers import DecoderLayer, Linear, Norm
from orca_backend.models.spec import ModelSpec
from orca_kernels import AttentionMetadata
from orca_kernels.cpu import Buffer, Dimensions, Epilogue, PackedLinear, Program, Quantization, pack_linear

_ACTIVATIONS = {"swiglu": Epilogue.SWIGLU, "gelu_tanh": Epilogue.GELU_TANH, "gelu_erf": Epilogue.GELU_ERF}


class CompiledDecoder:
    """Takes over the weights of `decoder` (packing them one by one; its layers are empty afterwards)."""

    def __init__(self, decoder: Decoder, threads: int, quantization: Quantization = Quantization.NONE) -> None:
        """Pack and build. Compressed weights leave the embedding and the head as they are.

        Raises CompilerError where the library cannot be had.
        """
        self.spec = spec = decoder.spec
        self._quantization = quantization
        self._kv: AttentionKV | None = None
        self.num_bytes = 0  # of all weights, packed
        dtype = decoder.embedding.dtype
        dimensions = Dimensions(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            vocabulary=spec.vocab_size,
        )
        self._program = program = Program(dimensions, spec.num_layers, dtype, threads)
        tied = decoder.head is None
        head = self._pack(
            decoder.embedding if decoder.head is None else decoder.head,
            None,
            Epilogue.STORE,
            Quantization.NONE if quantization.bits else quantization,
        )
        program.embed(head if tied else decoder.embedding.data, _data(decoder.position_embedding))
        if not tied:
            self.num_bytes += decoder.embedding.nbytes
        if decoder.position_embedding is not None:
            self.num_bytes += decoder.position_embedding.nbytes
        if tied:
            decoder.embedding = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        else:
            decoder.head = None
        cos_sin = None if decoder.inverse_frequencies is None else _angles(spec, decoder.inverse_frequencies)
        for i in range(spec.num_layers):
            layer = decoder.layers[i]
            assert isinstance(layer, DecoderLayer)
            self._norm(layer.attention_norm)
            self._linear(layer.attention.qkv, Buffer.HIDDEN, Buffer.QKV)
            program.rope_and_write(i, cos_sin)
            if i == spec.num_layers - 1:
                program.select()  # every token has its K/V; nobody reads the others' outputs any more
            program.attention(i, layer.attention.scale)
            self._linear(layer.attention.out, Buffer.CONTEXT, Buffer.RESIDUAL, Epilogue.ADD)
            self._norm(layer.mlp_norm)
            self._linear(layer.mlp.up, Buffer.HIDDEN, Buffer.MIDDLE, _ACTIVATIONS[spec.activation])
            self._linear(layer.mlp.down, Buffer.MIDDLE, Buffer.RESIDUAL, Epilogue.ADD)
        self._norm(decoder.norm)
        program.linear(head, Buffer.HIDDEN, Buffer.LOGITS)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent in all calls so far, by kind of operation."""
        return self._program.seconds()

    def _norm(self, norm: Norm) -> None:
        self._program.norm(norm.weight.data, _data(norm.bias), norm.eps)

    def _linear(self, linear: Linear, source: Buffer, target: Buffer, epilogue: Epilogue = Epilogue.STORE) -> None:
        assert isinstance(linear.weight, torch.nn.Parameter)  # it compresses by itself
        packed = self._pack(linear.weight.data, _data(linear.bias), epilogue, self._quantization)
        self._program.linear(packed, source, target)
        linear.weight = torch.nn.Parameter(linear.weight.new_empty(0), requires_grad=False)

    def _pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue, quantization: Quantization
    ) -> PackedLinear:
        packed = pack_linear(weight, bias, epilogue, quantization)
        self.num_bytes += packed.num_bytes
        return packed

    def __call__(
        self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv: AttentionKV, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """As `Decoder.forward`; the block size must be a multiple of 16."""
        if kv is not self._kv:
            for i, layer in enumerate(kv.layers):
                self._program.bind_kv(i, *layer)
            self._kv = kv
        return self._program.run(token_ids, metadata, logits_rows)


def _data(parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.data


def _angles(spec: ModelSpec, inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines, then sines, of every position: float32 [max positions, head_dim]."""
    angles = torch.arange(spec.max_positions, dtype=torch.float32)[:, None] * inverse_frequencies.float()
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
