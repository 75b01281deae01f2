"""What a device remembers of the sequences that have joined: their blocks, their sampling, their last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orca_backend.engine.device import Device
from orca_kernels.gpu.sampler_table import SamplerTable

if TYPE_CHECKING:
    from orca_backend.scheduler.iteration import IterationBatch, JoiningSequence

PENDING = 1 << 62  # in the place of a token id: the token that the sequence sampled last, which only the device knows


class SequenceTable:
    """Slots for `capacity` sequences of at most `max_blocks` blocks each.

    blocks: int32 [capacity, max_blocks]. sampler: the sampling kernels' table. Both on the device; `block_ids` is the
    same on the host, by request id.
    """

    def __init__(self, device: Device, *, capacity: int, max_blocks: int, vocab_size: int) -> None:
        """Nobody has joined."""
        self._device = device
        self._vocab_size = vocab_size
        self.blocks = torch.zeros(capacity, max_blocks, dtype=torch.int32, device=device.device)
        self.sampler = SamplerTable.empty(capacity, vocab_size, device.device)
        self.block_ids: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    @staticmethod
    def num_bytes(capacity: int, max_blocks: int, vocab_size: int) -> int:
        """Bytes on the device."""
        return capacity * (4 * max_blocks + SamplerTable.bytes_per_slot(vocab_size))

    def slot(self, request_id: int) -> int:
        """The slot of a sequence that has joined. Raises KeyError for others."""
        return self._slots[request_id]

    def admit(self, batch: IterationBatch) -> None:
        """Who left, who joined, who got more blocks."""
        for request_id in batch.dropped:
            if request_id in self._slots:
                self._free.append(self._slots.pop(request_id))
                del self.block_ids[request_id]
        for sequence in batch.joining:
            self._join(sequence)
        for request_id, block_ids in batch.new_blocks.items():
            if request_id in self._slots and block_ids:
                self._extend(request_id, block_ids)

    def _join(self, sequence: JoiningSequence) -> None:
        slot = self._slots.setdefault(sequence.request_id, -1)
        if slot < 0:
            slot = self._slots[sequence.request_id] = self._free.pop()
        self.block_ids[sequence.request_id] = []
        self._extend(sequence.request_id, sequence.block_ids)
        settings = sequence.sampling
        self.sampler.put(
            slot,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition=settings.repetition_penalty,
            presence=settings.presence_penalty,
            frequency=settings.frequency_penalty,
            seed=settings.seed,
            min_position=len(sequence.prompt_ids) + settings.min_tokens,
            prompt_ids=sequence.prompt_ids,
            output_ids=sequence.output_ids,
            stop_ids=[token for token in sequence.stop_token_ids if 0 <= token < self._vocab_size],
        )

    def _extend(self, request_id: int, block_ids: list[int]) -> None:
        known = self.block_ids[request_id]
        row = self.blocks[self._slots[request_id], len(known) : len(known) + len(block_ids)]
        self._device.upload(torch.tensor(block_ids, dtype=torch.int32), row)
        known += block_ids
