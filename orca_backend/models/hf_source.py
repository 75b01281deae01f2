"""A local Hugging Face model directory as the source of an import."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from orca_backend.models.spec import UnsupportedModelError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_CHUNK_ELEMENTS = 4 << 20
_IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # buffers that old checkpoints carry


class HfSource:
    """Weights from model.safetensors or its shards, everything else from the usual JSON files."""

    def __init__(self, directory: Path) -> None:
        """Look, do not read weights yet. Raises UnsupportedModelError naming what is missing or refused."""
        self._directory = directory
        self.config = self._json("config.json", required=True)
        self.generation_config = self._json("generation_config.json")
        if not self.generation_config:
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            self.generation_config = {name: self.config[name] for name in names if self.config.get(name) is not None}
        self._files = self._weight_files()
        self._prefix = "transformer." if any(name.startswith("h.0.") for name in self._files) else ""
        self.shapes: dict[str, list[int]] = {}
        for file in sorted(set(self._files.values())):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if not name.endswith(_IGNORED):
                        self.shapes[self._canonical(name)] = opened.get_slice(name).get_shape()

    def read(self, name: str) -> Iterator[torch.Tensor]:
        """Pieces of a tensor, in the file's type. Reopened each time, which gives back the pages mapped so far."""
        rows = self.shapes[name][0]
        per_row = max(1, torch.Size(self.shapes[name][1:]).numel())
        step = max(1, _CHUNK_ELEMENTS // per_row)
        stored = name if name in self._files else name.removeprefix(self._prefix)
        for first in range(0, rows, step):
            with safe_open(self._files[stored], framework="pt") as opened:
                yield opened.get_slice(stored)[first : first + step]

    def write_tokenizer(self, directory: Path) -> None:
        """Copy the tokenizer; the chat template goes where both old and new readers look."""
        source = self._directory / "tokenizer.json"
        if not source.exists():
            raise UnsupportedModelError(f"{self._directory} has no tokenizer.json (a fast tokenizer is required)")
        shutil.copyfile(source, directory / "tokenizer.json")
        config = self._json("tokenizer_config.json")
        template = self._directory / "chat_template.jinja"
        if template.exists():
            config["chat_template"] = template.read_text(encoding="utf-8")
        write_tokenizer_config(directory, config)

    def _json(self, name: str, required: bool = False) -> dict[str, Any]:
        file = self._directory / name
        if not file.exists():
            if required:
                raise UnsupportedModelError(f"{self._directory} has no {name}: not a Hugging Face model directory")
            return {}
        return json.loads(file.read_text(encoding="utf-8"))

    def _weight_files(self) -> dict[str, Path]:
        """Tensor name as stored to the file that holds it."""
        index = self._json("model.safetensors.index.json")
        if index:
            return {name: self._directory / file for name, file in index["weight_map"].items()}
        file = self._directory / "model.safetensors"
        if file.exists():
            with safe_open(file, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), file)
        pickles = sorted(f.name for f in self._directory.iterdir() if f.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise UnsupportedModelError(pickle_message(self._directory / pickles[0]))
        raise UnsupportedModelError(f"{self._directory} has no model.safetensors and no model.safetensors.index.json")

    def _canonical(self, name: str) -> str:
        """GPT-2 as first published lacks the prefix that transformers writes today."""
        return name if name.startswith((self._prefix, "lm_head.")) else self._prefix + name


def pickle_message(file: Path) -> str:
    """Why a pickle file is refused, and what to do."""
    return f"refused {file}: pickle files can run code when they are read; convert the weights to safetensors or GGUF"


def write_tokenizer_config(directory: Path, config: dict[str, Any]) -> None:
    """Write tokenizer_config.json, and its chat template also as chat_template.jinja, as transformers 5 does."""
    text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    if isinstance(config.get("chat_template"), str):
        (directory / "chat_template.jinja").write_text(config["chat_template"], encoding="utf-8")
