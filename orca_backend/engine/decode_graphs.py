"""Decode iterations as graphs: one token of each of up to `max_bs` sequences, captured once for each size of batch.

Legend: B = rows of a graph, the bucket; S = sequences with state on the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.device import Device, Replay
from orca_backend.engine.sequence_table import PENDING, SequenceTable
from orca_backend.models.decoder import Decoder
from orca_kernels.attention import AttentionMetadata
from orca_kernels.gpu.sampling import sample

_PADDING = (-1, 0, 0)


def bucket_sizes(max_bs: int) -> list[int]:
    """Sizes of batches that are captured: 1, 2, 4, then multiples of 8 (of 16 from 256 on), and `max_bs` itself."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_bs + 1, 16)]
    return sorted({*(size for size in sizes if size < max_bs), max_bs})


class DecodeGraphs:
    """The graphs and the buffers that they read and write.

    A row is (slot, position, token id): slot -1 is padding, which writes and samples nothing; token id PENDING takes
    the token that its sequence sampled last, which the host need not have seen.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        kv: AttentionKV,
        table: SequenceTable,
        *,
        max_bs: int,
        block_size: int,
        buckets: list[int] | None = None,
    ) -> None:
        """Capture, the largest first: the smaller ones then find room in the memory of the first.

        `buckets`, ascending up to `max_bs`; None: `bucket_sizes`.
        """
        self._device = device
        self._decoder = decoder
        self._kv = kv
        self._table = table
        self._block_size = block_size
        self.buckets = buckets or bucket_sizes(max_bs)
        self._inputs = torch.tensor([_PADDING] * max_bs, dtype=torch.int64).to(device.device)
        self._tokens = torch.zeros(max_bs, dtype=torch.int64, device=device.device)
        self._starts = torch.arange(max_bs + 1, dtype=torch.int32, device=device.device)
        self._graphs: dict[int, Replay] = {}
        for bucket in reversed(self.buckets):
            self._graphs[bucket] = device.capture(self._step(bucket))

    def run(self, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """Compute `rows`; the tokens on the device, int64 [len(rows)], valid until the next call."""
        bucket = self.buckets[bisect.bisect_left(self.buckets, len(rows))]
        padded = rows + [_PADDING] * (bucket - len(rows))
        self._device.upload(torch.tensor(padded, dtype=torch.int64), self._inputs[:bucket])
        self._graphs[bucket]()
        return self._tokens[: len(rows)]

    def _step(self, bucket: int) -> Callable[[], None]:
        table, block_size = self._table, self._block_size
        rows = torch.arange(bucket, device=self._device.device)

        def step() -> None:
            slots, positions, tokens = self._inputs[:bucket].t().contiguous()
            live, known = slots >= 0, slots.clamp(min=0)
            tokens = torch.where(tokens == PENDING, table.sampler.last_tokens[known], tokens)
            blocks = table.blocks[known]
            block = blocks.gather(1, (positions // block_size)[:, None])[:, 0]
            metadata = AttentionMetadata(
                query_start_loc=self._starts[: bucket + 1],
                seq_lens=torch.where(live, positions + 1, 0).int(),
                block_table=blocks,
                slot_mapping=torch.where(live, block * block_size + positions % block_size, -1),
                positions=positions,
                block_size=block_size,
                query_lens=(1,) * bucket,
                starts=(),
                block_ids=(),
            )
            logits = self._decoder(tokens, metadata, self._kv, rows)
            sampled, _ = sample(logits, slots.int(), positions + 1, table.sampler)
            self._tokens[:bucket].copy_(sampled)

        return step
