"""Fixtures for every room: real checkpoints, made once per session (SmolLM2 once per machine)."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # kernels in the Triton language run on CPU tensors; read when it is imported

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orca_backend.models.import_model import import_model, is_complete, smollm2_gguf

torch.set_num_threads(1)  # tests share the cores with the servers they start; a team that waits for a core is slower

REPOSITORY = Path(__file__).resolve().parents[1]
TINY_VOCABULARY = 320  # 256 bytes, three special tokens, the rest never produced by the tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, imported where `make demo` has it."""
    checkpoint = REPOSITORY / "models" / "smollm2-135m-instruct"
    if not is_complete(checkpoint):
        import_model(smollm2_gguf(), checkpoint)
    return checkpoint


@pytest.fixture(scope="session")
def tiny_llama_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with GQA and llama3 RoPE scaling, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    return _save(LlamaForCausalLM, config, tmp_path_factory.mktemp("tiny_llama_source"))


@pytest.fixture(scope="session")
def tiny_gpt2_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random GPT-2, as transformers saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=TINY_VOCABULARY,
        n_embd=60,
        n_layer=3,
        n_head=5,
        n_positions=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _save(GPT2LMHeadModel, config, tmp_path_factory.mktemp("tiny_gpt2_source"))


@pytest.fixture(scope="session")
def tiny_llama(tiny_llama_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random Llama as an imported checkpoint in float32."""
    checkpoint = tmp_path_factory.mktemp("imported") / "tiny-llama"
    import_model(tiny_llama_source, checkpoint, "float32")
    return checkpoint


@pytest.fixture(scope="session")
def tiny_gpt2(tiny_gpt2_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random GPT-2 as an imported checkpoint in float32."""
    checkpoint = tmp_path_factory.mktemp("imported") / "tiny-gpt2"
    import_model(tiny_gpt2_source, checkpoint, "float32")
    return checkpoint


def _save(model_class: type, config: object, directory: Path) -> Path:
    """Save a random model whose biases and norms are not the trivial ones, with a byte-level tokenizer."""
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i + 3 for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
