"""ModelSpec: what the decoder must be, read from a checkpoint's config.json and generation_config.json.

One decoder serves every family: a family is a set of values here plus a list of tensor names in weights.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something the decoder does not do; the message names it."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base `theta` and one of three frequency scalings (the last three fields: llama3 only)."""

    kind: Literal["default", "linear", "llama3"]
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only Transformer. `rope` None means learned absolute positions.

    `intermediate_size` is the width of the feed-forward layer after the activation; `max_positions` is the most tokens
    a sequence may have; `dtype` is the checkpoint's own.
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["swiglu", "gelu_tanh", "gelu_erf"]
    rope: RopeSpec | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, checkpoint: str | Path) -> ModelSpec:
        """The spec of a checkpoint directory.

        Raises UnsupportedModelError naming what is unknown, FileNotFoundError without a config.json.
        """
        directory = Path(checkpoint)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        generation_file = directory / "generation_config.json"
        generation = json.loads(generation_file.read_text(encoding="utf-8")) if generation_file.exists() else {}
        return cls.from_config(config, generation)

    @classmethod
    def from_config(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
        """The spec of a parsed config.json and generation_config.json. Raises as `read` does."""
        architectures = config.get("architectures") or [f"model_type {config.get('model_type')}"]
        if architectures[0] not in _READERS:
            known = ", ".join(sorted(_READERS))
            raise UnsupportedModelError(f"unsupported architecture {architectures[0]!r}; known are {known}")
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise UnsupportedModelError(f"unsupported quantization_config of method {method!r}")
        try:
            fields = _READERS[architectures[0]](config)
        except KeyError as error:
            raise UnsupportedModelError(f"config.json of a {architectures[0]} lacks {error}") from error
        return cls(
            architecture=architectures[0],
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            eos_token_ids=_eos_ids(config, generation or {}),
            vocab_size=config["vocab_size"],
            **fields,
        )


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of a LlamaForCausalLM."""
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"unsupported hidden_act {config['hidden_act']!r} for LlamaForCausalLM")
    heads = config["num_attention_heads"]
    attention_bias = config.get("attention_bias", False)
    return {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "max_positions": config["max_position_embeddings"],
        "norm": "rms",
        "norm_eps": config["rms_norm_eps"],
        "activation": "swiglu",
        "rope": _rope(config),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": config.get("mlp_bias", False),
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }


def _gpt2(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of a GPT2LMHeadModel."""
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_erf"}
    activation = config.get("activation_function", "gelu_new")
    if activation not in activations:
        raise UnsupportedModelError(f"unsupported activation_function {activation!r} for GPT2LMHeadModel")
    for name, wanted in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.get(name, wanted) is not wanted:
            raise UnsupportedModelError(f"unsupported {name}={config[name]} for GPT2LMHeadModel")
    hidden, heads = config["n_embd"], config["n_head"]
    return {
        "hidden_size": hidden,
        "num_layers": config["n_layer"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "max_positions": config["n_positions"],
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": activations[activation],
        "rope": None,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


_READERS = {"LlamaForCausalLM": _llama, "GPT2LMHeadModel": _gpt2}


def _rope(config: dict[str, Any]) -> RopeSpec:
    """RoPE as transformers 5 writes it (`rope_parameters`) or as older ones do (`rope_theta`, `rope_scaling`)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(f"unsupported partial_rotary_factor {partial}")
    if kind == "default":
        return RopeSpec(kind="default", theta=theta)
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, factor=float(parameters["factor"]))
    if kind == "llama3":
        return RopeSpec(
            kind="llama3",
            theta=theta,
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_positions=parameters.get("original_max_position_embeddings")
            or config["max_position_embeddings"],
        )
    raise UnsupportedModelError(f"unsupported RoPE type {kind!r}; known are default, linear, llama3")


def _eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids; generation_config.json wins over config.json, as in transformers."""
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
