"""Servers of the product's own model repository, with other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orca_backend.server.triton_server import TritonServer

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
MAX_MODEL_LEN = 1024  # of the server that most tests share


def new_server(model: Path, log: Path, models: list[str] | None = None, **overrides: Any) -> TritonServer:
    """A server, not yet started. `limits__drain_timeout=3.0` overrides limits.drain_timeout."""
    settings: dict[str, Any] = {"model": str(model), "dtype": "float32"}
    settings |= {name.replace("__", "."): value for name, value in overrides.items()}
    return TritonServer(REPOSITORY, models=models, overrides=settings, log=log)
