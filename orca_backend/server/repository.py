"""The run-time copy of a model repository: settings are changed there, the original stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orca_backend.config import ConfigError, EngineConfig, load_config
from orca_backend.models.spec import ModelSpec

ENGINE_FILE = "engine.yaml"
CHECKPOINT_FILES = ("config.json", "tokenizer.json", "model.safetensors")  # without which nothing can be served
DEFAULT_MODEL = "orca"


def models_in(repository: Path) -> list[str]:
    """The names of the models in `repository`."""
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))


def choose_models(repository: Path, names: Sequence[str] | None) -> list[str]:
    """The models to load: `names`, or the default one, or all where the default is not there. Raises ConfigError."""
    available = models_in(repository)
    if names is None:
        if not available:
            raise ConfigError(f"{repository}: no model repository (no directory in it has a config.pbtxt)")
        return [DEFAULT_MODEL] if DEFAULT_MODEL in available else available
    for name in names:
        if name not in available:
            raise ConfigError(f"{repository}: no model {name!r}; there is {', '.join(available) or 'none at all'}")
    return list(names)


def parse_overrides(settings: Sequence[str]) -> dict[str, Any]:
    """`["scheduler.max_bs=8"]` as {"scheduler.max_bs": 8}; values are YAML. Raises ConfigError."""
    overrides = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"{setting!r} is no setting: write NAME=VALUE, for example scheduler.max_bs=8")
        try:
            overrides[name] = msgspec.yaml.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{setting!r}: {error}") from error
    return overrides


def check_checkpoint(directory: Path) -> None:
    """Raise ConfigError if `directory` is not a checkpoint, or not one of a model that can be served."""
    if missing := [name for name in CHECKPOINT_FILES if not (directory / name).is_file()]:
        what = f"no {', '.join(missing)} in it" if directory.is_dir() else "no such directory"
        raise ConfigError(f"{directory}: {what}; make a checkpoint: orca import-model SOURCE {directory}")
    try:
        ModelSpec.read(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory}: {error}") from error


def copy_repository(
    source: Path, destination: Path, models: Sequence[str], overrides: Mapping[str, Any]
) -> dict[str, EngineConfig]:
    """Mirror all of `source` in `destination`; in `models`, `overrides` win over their engine.yaml.

    Files are links, so that nothing large is copied and nothing (not even a bytecode cache) is written to the original.
    Only engine.yaml is written anew: complete, validated, its paths absolute. Returns the configuration of each of
    `models` that has one. Raises ConfigError for a setting that is not valid, or that no model has a file for.
    """
    configs = {}
    source = source.resolve()
    destination.mkdir(parents=True, exist_ok=True)
    for name in models_in(source):
        for path in sorted((source / name).rglob("*")):
            copy = destination / path.relative_to(source)
            if path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            elif "__pycache__" not in path.parts:
                copy.parent.mkdir(parents=True, exist_ok=True)
                if path.name == ENGINE_FILE:
                    config = load_config(path, dict(overrides) if name in models else None, origin="--set")
                    copy.write_bytes(msgspec.yaml.encode(config))
                    if name in models:
                        configs[name] = config
                else:
                    copy.symlink_to(path)
    if overrides and not configs:
        raise ConfigError(f"{source}: no {ENGINE_FILE} in {', '.join(models)}, so nothing can be set")
    return configs
