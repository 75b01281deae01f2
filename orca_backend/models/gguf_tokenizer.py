"""A tokenizer from the metadata of a GGUF file: byte-level BPE as GPT-2 and its descendants use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from orca_backend.models.spec import UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# What ends an answer, whatever the file's eos_token_id is; llama.cpp recognises them by name as well.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes.

    Raises UnsupportedModelError naming a tokenizer model or pre-tokenizer that is not known.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModelError(f"unsupported GGUF tokenizer model {model!r}; known is gpt2 (byte-level BPE)")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata)
    tokenizer.decoder = decoders.ByteLevel()
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[metadata["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _pre_tokenizer(metadata: Mapping[str, Any]) -> pre_tokenizers.PreTokenizer:
    """How text is cut before the merges apply."""
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", False))
    if name in ("gpt-2", "gpt2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise UnsupportedModelError(f"unsupported GGUF pre-tokenizer {name!r}; known are gpt-2, smollm")


def tokenizer_config(metadata: Mapping[str, Any], model_max_length: int) -> dict[str, Any]:
    """The tokenizer_config.json that goes with `build_tokenizer`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The file's end-of-sequence id first, then the other control tokens that end an answer."""
    ids = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    kinds = metadata["tokenizer.ggml.token_type"]
    ids += [
        i for i, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token in _END_TOKENS and kinds[i] == _CONTROL
    ]
    return list(dict.fromkeys(ids))
