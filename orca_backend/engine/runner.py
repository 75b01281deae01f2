"""The runner of one device: an IterationBatch in, one forward pass and one round of sampling, a result out."""

from __future__ import annotations

import time

import torch

from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.sampler import Sampler
from orca_backend.engine.selective import flatten
from orca_backend.models.compiled import CompiledDecoder
from orca_backend.models.decoder import Decoder
from orca_backend.scheduler.iteration import IterationBatch, IterationResult


class ModelRunner:
    """Holds the model, the K/V tensors, the sampler, and the block table of every sequence. Decides nothing."""

    def __init__(
        self,
        decoder: Decoder | CompiledDecoder,
        kv: AttentionKV,
        sampler: Sampler,
        *,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Take over a loaded model, its K/V pool and a sampler for its vocabulary."""
        self.decoder = decoder
        self.kv = kv
        self._sampler = sampler
        self._block_size = block_size
        self._device = device
        self._block_tables: dict[int, list[int]] = {}

    @torch.inference_mode()
    def run(self, batch: IterationBatch) -> IterationResult:
        """Run one iteration. K/V of its tokens is written even when the result is an exception."""
        started = time.perf_counter()
        self._admit(batch)
        flat = flatten(batch, self._block_tables, self._block_size, self._device)
        forward = time.perf_counter()
        logits_rv = self.decoder(flat.token_ids, flat.metadata, self.kv, flat.logits_rows).cpu().numpy()
        sampling = time.perf_counter()
        sampled = [-1] * len(batch.rows)
        failed: dict[int, str] = {}
        rows = [batch.rows[i] for i in flat.sampling_rows]
        chosen = self._sampler.choose(
            logits_rv, [row.request_id for row in rows], [row.start + row.num_tokens for row in rows]
        )
        for i, row, choice in zip(flat.sampling_rows, rows, chosen, strict=True):
            if isinstance(choice, str):
                failed[row.request_id] = choice
            else:
                sampled[i] = choice
        ended = time.perf_counter()
        return IterationResult(
            iteration_id=batch.iteration_id,
            sampled=sampled,
            failed=failed,
            seconds=ended - started,
            forward_seconds=sampling - forward,
            sample_seconds=ended - sampling,
        )

    def _admit(self, batch: IterationBatch) -> None:
        """Bring the per-sequence state up to date: who left, who joined, who got more blocks; move K/V blocks."""
        for request_id in batch.dropped:
            self._block_tables.pop(request_id, None)
            self._sampler.drop(request_id)
        for sequence in batch.joining:
            self._block_tables[sequence.request_id] = list(sequence.block_ids)
            self._sampler.join(sequence)
        for request_id, block_ids in batch.new_blocks.items():
            self._block_tables[request_id].extend(block_ids)
        self.kv.move_blocks(batch.swapped_out, batch.copied, batch.swapped_in)
