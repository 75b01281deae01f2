"""A Llama checkpoint as a GGUF file, for llama.cpp: weights of the checkpoint, everything else of another GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

_KINDS = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


def write_gguf(checkpoint: Path, template: Path, kind: str, target: Path) -> None:
    """Write matrices in `kind` ("bf16" or "q8_0") and vectors in float32, as llama.cpp's own converter does.

    `template` is any GGUF file of the same model: the tokenizer and the hyperparameters are its own.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(target, "llama")
    for field in gguf.GGUFReader(template).fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(_FILE_TYPES[kind])
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (no mapping)
            tensor = weights.get_tensor(name).float()
            count = next((count for part, count in heads.items() if part in name), None)
            if count:
                # llama.cpp interleaves the two halves of a head that RoPE turns together.
                tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
            new = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise ValueError(f"no tensor of a Llama model: {name}")
            values = tensor.contiguous().numpy().astype(np.float32)
            if values.ndim == 1:
                writer.add_tensor(new, values)
            else:
                writer.add_tensor(new, gguf.quantize(values, _KINDS[kind]), raw_dtype=_KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
