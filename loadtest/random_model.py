"""A checkpoint of one of the paper's GPT shapes with random weights: speed does not depend on what they are.

The paper had no checkpoints either (section 6). The tokenizer is another checkpoint's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from orca_backend.models.safetensors_file import write_safetensors
from orca_backend.models.weights import WEIGHTS_FILE

POSITIONS = 2048  # the paper's longest sequence
DEVIATION = 0.02  # GPT-2's initialization
PIECE = 1 << 24  # values drawn at a time: bounds what is held


class Shape(NamedTuple):
    """Of a GPT."""

    layers: int
    hidden: int
    heads: int


# Table 1 of the paper; heads of GPT-3 where it has the same size (the others: 128 values each).
SHAPES = {
    "13B": Shape(40, 5120, 40),
    "101B": Shape(80, 10240, 80),
    "175B": Shape(96, 12288, 96),
    "341B": Shape(120, 15360, 120),
}


def make(destination: Path, shape: Shape, tokenizer_of: Path, seed: int = 0) -> None:
    """Write the checkpoint in bfloat16 to `destination`, which must not exist."""
    vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    destination.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, destination)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": POSITIONS,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (destination / "generation_config.json").write_text("{}\n")
    tensors = tensor_shapes(shape, vocabulary)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str) -> Iterator[torch.Tensor]:
        rows, columns = (tensors[name] if len(tensors[name]) == 2 else (tensors[name][0], 1))[:2]
        norm = ".ln_" in name
        step = max(1, PIECE // columns)
        for first in range(0, rows, step):
            piece = torch.randn(min(step, rows - first), columns, generator=generator) * DEVIATION
            yield piece.view(-1, *tensors[name][1:]) + (1.0 if norm and name.endswith("weight") else 0.0)

    write_safetensors(destination / WEIGHTS_FILE, tensors, torch.bfloat16, draw)


def tensor_shapes(shape: Shape, vocabulary: int) -> dict[str, list[int]]:
    """GPT-2's tensors (its linear layers are [in, out])."""
    hidden = shape.hidden
    tensors = {"transformer.wte.weight": [vocabulary, hidden], "transformer.wpe.weight": [POSITIONS, hidden]}
    linears = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }
    norms = ["transformer.ln_f"]
    for layer in range(shape.layers):
        norms += [f"transformer.h.{layer}.{name}" for name in ("ln_1", "ln_2")]
        for name, (inputs, outputs) in linears.items():
            tensors[f"transformer.h.{layer}.{name}.weight"] = [inputs, outputs]
            tensors[f"transformer.h.{layer}.{name}.bias"] = [outputs]
    for name in norms:
        tensors |= {f"{name}.weight": [hidden], f"{name}.bias": [hidden]}
    return tensors
