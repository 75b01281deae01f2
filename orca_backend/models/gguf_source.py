"""A GGUF file as the source of an import: its metadata as config.json, its tensors dequantized piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from orca_backend.models.gguf_tokenizer import build_tokenizer, end_token_ids, tokenizer_config
from orca_backend.models.hf_source import write_tokenizer_config
from orca_backend.models.spec import UnsupportedModelError

_CHUNK_ELEMENTS = 4 << 20

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_FAMILIES = {"llama": (_LLAMA_NAMES, "model.layers"), "gpt2": (_GPT2_NAMES, "transformer.h")}
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # [in, out] in a checkpoint, [out, in] in GGUF


class GgufSource:
    """A GGUF file of architecture llama or gpt2, any quantization the gguf package can undo."""

    def __init__(self, file: Path) -> None:
        """Read the metadata. Raises UnsupportedModelError naming what is unknown, or for a file that is no GGUF."""
        try:
            reader = gguf.GGUFReader(file)
        except ValueError as error:
            raise UnsupportedModelError(f"{file} is not a GGUF file that can be read: {error}") from error
        self._metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        architecture = self._metadata["general.architecture"]
        if architecture not in _FAMILIES:
            raise UnsupportedModelError(f"unsupported GGUF architecture {architecture!r}; known are gpt2, llama")
        if self._metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(f"{file} is one part of a split GGUF; merge the parts first")
        self._tensors = {self._checkpoint_name(tensor.name, architecture): tensor for tensor in reader.tensors}
        try:
            self.config = self._llama_config() if architecture == "llama" else self._gpt2_config()
            ends = end_token_ids(self._metadata)
        except KeyError as error:
            raise UnsupportedModelError(f"{file} lacks the metadata {error}") from error
        self.shapes = {name: self._shape(name) for name in self._tensors}
        tokens = {name: self.config[name] for name in ("bos_token_id", "pad_token_id") if self.config[name] is not None}
        self.generation_config = tokens | {"eos_token_id": ends}

    def read(self, name: str) -> Iterator[torch.Tensor]:
        """Pieces of a tensor, dequantized to float32."""
        tensor = self._tensors[name]
        order = self._row_order(name)
        rows, per_row = tensor.data.shape[0], tensor.n_elements // tensor.data.shape[0]
        step = rows if name.endswith(_CONV1D) else max(1, _CHUNK_ELEMENTS // per_row)
        for first in range(0, rows, step):
            packed = tensor.data[first : first + step] if order is None else tensor.data[order[first : first + step]]
            try:
                values = gguf.dequantize(packed, tensor.tensor_type).astype(np.float32)
            except NotImplementedError as error:
                kind = tensor.tensor_type.name
                raise UnsupportedModelError(f"unsupported GGUF tensor type {kind} of {tensor.name!r}") from error
            piece = torch.from_numpy(values)
            yield piece.t() if name.endswith(_CONV1D) else piece

    def write_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template."""
        build_tokenizer(self._metadata).save(str(directory / "tokenizer.json"))
        limit = self._metadata[f"{self._metadata['general.architecture']}.context_length"]
        write_tokenizer_config(directory, tokenizer_config(self._metadata, limit))

    def _checkpoint_name(self, name: str, architecture: str) -> str:
        """Name of the tensor in a transformers checkpoint. Raises UnsupportedModelError for one that has none."""
        names, layers = _FAMILIES[architecture]
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if not match or match[2] not in names:
            raise UnsupportedModelError(f"unsupported GGUF tensor {name!r} for architecture {architecture!r}")
        block = f"{layers}.{match[1]}." if match[1] else ""
        return f"{block}{names[match[2]]}.{match[3]}"

    def _shape(self, name: str) -> list[int]:
        """Shape in the checkpoint; GGUF counts dimensions from the innermost."""
        shape = [int(n) for n in reversed(self._tensors[name].shape)]
        return shape[::-1] if name.endswith(_CONV1D) else shape

    def _row_order(self, name: str) -> np.ndarray | None:
        """Undo llama.cpp's order of the query and key rows, which interleaves the two halves that RoPE turns together.

        Rows may be taken from quantized data, because blocks run along rows.
        """
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
        count = next((self.config[key] for part, key in heads.items() if part in name), None)
        if count is None:
            return None
        rows = self._tensors[name].data.shape[0]
        return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(rows)

    def _common_config(self, architecture: str, model_type: str) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": len(self._metadata["tokenizer.ggml.tokens"]),
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._metadata.get("tokenizer.ggml.padding_token_id"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
        }

    def _llama_config(self) -> dict[str, Any]:
        data = self._metadata
        hidden, heads = data["llama.embedding_length"], data["llama.attention.head_count"]
        return self._common_config("LlamaForCausalLM", "llama") | {
            "hidden_size": hidden,
            "intermediate_size": data["llama.feed_forward_length"],
            "num_hidden_layers": data["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": data.get("llama.attention.head_count_kv", heads),
            "head_dim": data.get("llama.attention.key_length", hidden // heads),
            "max_position_embeddings": data["llama.context_length"],
            "rms_norm_eps": _short(data["llama.attention.layer_norm_rms_epsilon"]),
            "hidden_act": "silu",
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self._tensors,
            "rope_parameters": self._rope_parameters(),
        }

    def _rope_parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": _short(self._metadata.get("llama.rope.freq_base", 10000.0)),
        }
        kind = self._metadata.get("llama.rope.scaling.type", "none")
        if kind == "linear":
            parameters |= {"rope_type": "linear", "factor": _short(self._metadata["llama.rope.scaling.factor"])}
        elif kind != "none":
            raise UnsupportedModelError(f"unsupported RoPE type {kind!r} in GGUF; known are none, linear")
        return parameters

    def _gpt2_config(self) -> dict[str, Any]:
        data = self._metadata
        return self._common_config("GPT2LMHeadModel", "gpt2") | {
            "n_embd": data["gpt2.embedding_length"],
            "n_inner": data["gpt2.feed_forward_length"],
            "n_layer": data["gpt2.block_count"],
            "n_head": data["gpt2.attention.head_count"],
            "n_positions": data["gpt2.context_length"],
            "layer_norm_epsilon": _short(data["gpt2.attention.layer_norm_epsilon"]),
            "activation_function": "gelu_new",
        }


def _short(value: float) -> float:
    """The decimal that was meant: GGUF stores float32, so 1e-5 reads as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
