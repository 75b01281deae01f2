"""A model in this process, exactly as the engine process builds it, without the scheduler around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from orca_backend.channel import EngineInfo
from orca_backend.config import EngineConfig
from orca_backend.engine.__main__ import load
from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.runner import ModelRunner
from orca_backend.models.compiled import CompiledDecoder
from orca_backend.models.decoder import Decoder
from orca_kernels import AttentionMetadata


@dataclass(frozen=True)
class Model:
    """What the engine runs, its parts, and what it says of itself."""

    runner: ModelRunner
    decoder: Decoder | CompiledDecoder
    kv: AttentionKV
    info: EngineInfo

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits after every token of one sequence that is run as a single row: float32 [tokens, vocabulary]."""
        count = len(token_ids)
        blocks = list(range(-(-count // self.info.block_size)))
        metadata = AttentionMetadata.build([count], [0], [blocks], self.info.block_size)
        with torch.inference_mode():
            logits: torch.Tensor = self.decoder(torch.tensor(token_ids), metadata, self.kv, torch.arange(count))
        return logits

    def seconds(self) -> dict[str, float]:
        """Seconds so far by kind of operation of the compiled program."""
        assert isinstance(self.decoder, CompiledDecoder)
        return self.decoder.seconds


def open_model(**settings: Any) -> Model:
    """Load and pack by these settings of engine.yaml; raises what an engine would report as its failure to start."""
    _, runner, info = load(msgspec.convert(settings, EngineConfig))
    assert isinstance(runner, ModelRunner)
    return Model(runner, runner.decoder, runner.kv, info)
