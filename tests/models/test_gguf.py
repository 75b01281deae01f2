"""Import from GGUF against what transformers makes of the same file, and against models written to GGUF here."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from orca_backend.models.gguf_source import GgufSource
from orca_backend.models.import_model import import_model, smollm2_gguf
from orca_backend.models.spec import UnsupportedModelError

TEXTS = [
    "Hello, world! It's 2024-11-29 and 1,234.5678 costs $99.99.",
    "The quick brown fox   jumps\n\n\tover 13 lazy dogs.  \r\n",
    "北京是中国的首都，人口超过2100万。日本語のテキスト、한국어 문장.",
    "Привет, мир! Сколько будет 2+2? Ελληνικά, עברית, العربية ١٢٣",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇫🇷 e\u0301 \u200b ½ ² Ⅷ",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 0xFF, 1e-5, __init__\n\tif (a&&b) { a[i++] = 0; }\n",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<|endoftext|><|im_start|",
    "don't we'll they've I'm you'd HE'S\u00a0non-breaking",
    "",
    " ",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def transformers_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf().parent, gguf_file=smollm2_gguf().name)


def test_tokens_equal_those_of_transformers(smollm2: Path, transformers_tokenizer) -> None:
    """transformers ignores the file's pre-tokenizer "smollm", which sets numerals apart; so it gets them apart."""
    ours = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        assert ids == [i for piece in pieces for i in transformers_tokenizer(piece)["input_ids"]], text
        if not regex.search(r"\p{N}(?<![0-9])", text):  # ASCII digits are in no merge, so there it makes no difference
            assert ids == transformers_tokenizer(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.get_vocab_size() == 49152
    assert ours.get_vocab() == transformers_tokenizer.get_vocab()


def test_transformers_reads_the_import(smollm2: Path, transformers_tokenizer) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == transformers_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((smollm2 / "tokenizer_config.json").read_text())["chat_template"] == tokenizer.chat_template
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    ends = GenerationConfig.from_pretrained(smollm2).eos_token_id
    assert [tokenizer.decode([i]) for i in ends] == ["<|im_end|>", "<|endoftext|>"]
    assert AutoConfig.from_pretrained(smollm2).dtype == torch.bfloat16


def test_the_model_still_knows_what_it_knew(smollm2: Path) -> None:
    """Rows of the query and key projections in a wrong order would leave a model that only babbles."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(question).ids])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert tokenizer.decode(answer[0, ids.shape[1] :].tolist()).startswith("The capital of France is Paris.")


def write_gguf(file: Path, architecture: str, source: Path, quantize: bool = False, **metadata: object) -> None:
    """Write the safetensors model in `source` as llama.cpp's converter would."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    if architecture == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        kind = gguf.MODEL_ARCH.LLAMA
    else:
        heads = {}
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_context_length(config["n_positions"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        kind = gguf.MODEL_ARCH.GPT2
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = ["<unk>", "<s>", "</s>", *sorted(vocabulary, key=vocabulary.__getitem__)]
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens) - 1)] + ["ĀĀ"]  # two NUL bytes
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ā Ā"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in metadata.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(name, value)
    names = gguf.get_tensor_name_map(kind, 3)
    for name, tensor in load_file(source / "model.safetensors").items():
        array = tensor.numpy()
        if architecture == "gpt2" and ".c_" in name and array.ndim == 2:
            array = array.T
        for part, count in heads.items():
            if part in name:
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        array = np.ascontiguousarray(array)
        if quantize and array.ndim == 2 and array.shape[1] % 32 == 0:
            packed = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_written_to_gguf_comes_back_exactly(
    architecture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(f"tiny_{architecture}_source")
    write_gguf(tmp_path / "model.gguf", architecture, source)
    import_model(tmp_path / "model.gguf", tmp_path / "dest", "float32")
    expected, actual = load_file(source / "model.safetensors"), load_file(tmp_path / "dest" / "model.safetensors")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "dest" / "config.json").read_text())
    shared = before.keys() & after.keys() - {"rope_parameters", "n_inner"}
    assert {name: after[name] for name in shared} == {name: before[name] for name in shared}
    text = "Plain text, 日本語 and 😀."
    original = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert Tokenizer.from_file(str(tmp_path / "dest" / "tokenizer.json")).encode(text).ids == original.encode(text).ids


def test_quantized_rows_are_put_in_order_too(tiny_llama_source: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", tiny_llama_source, quantize=True)
    import_model(tmp_path / "model.gguf", tmp_path / "dest", "float32")
    expected = load_file(tiny_llama_source / "model.safetensors")
    actual = load_file(tmp_path / "dest" / "model.safetensors")
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=expected[name].abs().max().item() / 127)
    assert not torch.equal(
        actual["model.layers.0.self_attn.q_proj.weight"], expected["model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_beginning_of_sequence_token_is_added_when_the_file_says_so(tiny_gpt2_source: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "gpt2", tiny_gpt2_source, **{"tokenizer.ggml.add_bos_token": True})
    import_model(tmp_path / "model.gguf", tmp_path / "dest", "float32")
    tokenizer = Tokenizer.from_file(str(tmp_path / "dest" / "tokenizer.json"))
    ids = Tokenizer.from_file(str(tiny_gpt2_source / "tokenizer.json")).encode("abc").ids
    assert tokenizer.encode("abc").ids == [1, *ids]
    assert tokenizer.encode("abc", add_special_tokens=False).ids == ids


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"general.architecture": "mamba"}, "mamba"),
    ],
)
def test_what_is_unknown_is_refused_by_name(
    metadata: dict[str, str], named: str, tiny_llama_source: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", tiny_llama_source, **metadata)
    with pytest.raises(UnsupportedModelError, match=named):
        import_model(tmp_path / "model.gguf", tmp_path / "dest")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not at all" * 100)
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf is not a GGUF file"):
        GgufSource(tmp_path / "model.gguf")
