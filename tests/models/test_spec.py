"""Reading config.json: both ways to write RoPE, and refusals by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import orca_backend.models.spec
from orca_backend.models.layers import rope_inverse_frequencies
from orca_backend.models.spec import ModelSpec, RopeSpec, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}


def test_defaults_of_both_families() -> None:
    llama, gpt2 = ModelSpec.from_config(LLAMA), ModelSpec.from_config(GPT2)
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings, llama.dtype) == (4, 16, False, "float32")
    assert llama.rope == RopeSpec(kind="default", theta=10000.0)
    assert (gpt2.intermediate_size, gpt2.activation, gpt2.tie_embeddings, gpt2.rope) == (256, "gelu_tanh", True, None)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        ),
    ],
)
def test_both_ways_to_write_rope_agree_with_transformers(new: dict[str, Any], old: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = ModelSpec.from_config(LLAMA | {"rope_parameters": new})
    assert ModelSpec.from_config(LLAMA | old) == spec
    assert spec.rope is not None
    expected = LlamaRotaryEmbedding(LlamaConfig(**LLAMA, rope_parameters=new)).inv_freq
    torch.testing.assert_close(rope_inverse_frequencies(spec.rope, spec.head_dim), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA | {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"model_type": "bert"}, "bert"),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"hidden_act": "relu"}, "relu"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (GPT2 | {"activation_function": "swish"}, "swish"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size"),
    ],
)
def test_what_is_unknown_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ModelSpec.from_config(config)


def test_end_of_sequence_ids_come_from_the_generation_config_first() -> None:
    assert ModelSpec.from_config(LLAMA).eos_token_ids == ()
    assert ModelSpec.from_config(LLAMA | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert ModelSpec.from_config(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)


def test_models_know_no_requests_and_need_no_transformers() -> None:
    for file in Path(orca_backend.models.spec.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            forbidden = ("transformers", "orca_backend.request", "orca_backend.scheduler", "orca_backend.serving")
            assert not any(name.startswith(forbidden) for name in names), file.name
