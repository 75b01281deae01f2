"""Prompts for the scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOCK_MODELS = Path(__file__).parent / "mock_model"
MODEL = "scripted"


def script(*tokens: str, **orders: Any) -> str:
    """A prompt that makes the model send `tokens`; `orders` are the other keys it knows."""
    return json.dumps({"tokens": tokens, **orders})


def endless(delay: float = 0.02) -> str:
    """A prompt whose answer takes longer than any test."""
    return script(*["x"] * 10_000, delay=delay)
