"""The runner of a GPU: state and buffers that stay on the device, graphs for decode, results that come later.

Iterations are launched one after the other and not waited for: the tokens of one are gathered on the device for the
next, and copied to the host meanwhile. The host then knows them one iteration late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.decode_graphs import DecodeGraphs
from orca_backend.engine.device import Device, Download
from orca_backend.engine.sampler import NOT_FINITE
from orca_backend.engine.sequence_table import PENDING, SequenceTable
from orca_backend.models.decoder import Decoder
from orca_backend.request import SamplerSettings
from orca_backend.scheduler.iteration import IterationBatch, IterationResult, JoiningSequence, Row
from orca_kernels.attention import AttentionMetadata
from orca_kernels.constants import LINEAR_TOKENS
from orca_kernels.gpu.sampling import sample

# Of a forward pass: far more than make it bound by its products, which are bound by memory below about 300 tokens
# (operations per byte of an H100), and few enough for what lies between the layers to be small.
MAX_PASS_TOKENS = 8192


class Pending:
    """An iteration that was launched."""

    def __init__(self, batch: IterationBatch, started: float, parts: list[tuple[list[int], Download]]) -> None:
        """`parts`: indices into the batch's rows, and the tokens of these on their way."""
        self._batch = batch
        self._started = started
        self._parts = parts

    def wait(self) -> IterationResult:
        """Its result, when it is there."""
        sampled = [-1] * len(self._batch.rows)
        failed: dict[int, str] = {}
        for indices, download in self._parts:
            for i, token in zip(indices, download.wait().tolist(), strict=True):
                sampled[i] = token
                if token < 0:
                    failed[self._batch.rows[i].request_id] = NOT_FINITE
        seconds = time.perf_counter() - self._started
        return IterationResult(
            iteration_id=self._batch.iteration_id,
            sampled=sampled,
            failed=failed,
            seconds=seconds,
            forward_seconds=seconds,
        )


def passes(rows: list[Row], max_tokens: int) -> Iterator[list[tuple[int, Row]]]:
    """Rows of an iteration in forward passes of at most `max_tokens` tokens, each with its index; long rows in chunks.

    What an iteration is, is the scheduler's decision; this only bounds the memory that it takes.
    """
    part: list[tuple[int, Row]] = []
    left = max_tokens
    for index, row in enumerate(rows):
        start, end = row.start, row.start + row.num_tokens
        while start < end:
            if left == 0:
                yield part
                part, left = [], max_tokens
            length = min(left, end - start)
            last = start + length == end
            part.append((index, Row(row.request_id, start, length, row.sample and last)))
            start += length
            left -= length
    yield part


class GpuRunner:
    """Holds the model, the K/V tensors and the state of every sequence. Decides nothing."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        kv: AttentionKV,
        *,
        block_size: int,
        max_bs: int,
        max_sequences: int,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        """Take over a loaded model and its K/V pool, and compile and capture everything that serving will need.

        At most `max_sequences` of at most `max_model_len` tokens have joined at once, `max_bs` in an iteration; a
        forward pass has at most `max_tokens` tokens.
        """
        self._device = device
        self._decoder = decoder
        self._kv = kv
        self._block_size = block_size
        self._max_bs = max_bs
        self._max_tokens = max_tokens
        self._table = SequenceTable(
            device,
            capacity=max_sequences,
            max_blocks=-(-max_model_len // block_size),
            vocab_size=decoder.spec.vocab_size,
        )
        with torch.inference_mode():
            self._warm_up()
            self._graphs = DecodeGraphs(device, decoder, kv, self._table, max_bs=max_bs, block_size=block_size)

    @property
    def buckets(self) -> list[int]:
        """Sizes of decode batches that have a graph."""
        return self._graphs.buckets

    def run(self, batch: IterationBatch) -> IterationResult:
        """Run one iteration and wait for it."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: IterationBatch) -> Pending:
        """Submit one iteration; K/V of its tokens is written even if it fails later."""
        started = time.perf_counter()
        self._device.activate()
        self._table.admit(batch)
        self._kv.move_blocks(batch.swapped_out, batch.copied, batch.swapped_in)
        if all(row.num_tokens == 1 and row.sample for row in batch.rows) and len(batch.rows) <= self._max_bs:
            slot = self._table.slot
            rows = [
                (slot(row.request_id), row.start, token) for row, token in zip(batch.rows, batch.token_ids, strict=True)
            ]
            tokens = self._device.download(self._graphs.run(rows))
            return Pending(batch, started, [(list(range(len(rows))), tokens)])
        first = 0
        parts = []
        for part in passes(batch.rows, self._max_tokens):
            last = first + sum(row.num_tokens for _, row in part)
            sampling = [index for index, row in part if row.sample]
            tokens_r = self._forward([row for _, row in part], batch.token_ids[first:last])
            parts.append((sampling, self._device.download(tokens_r)))
            first = last
        return Pending(batch, started, parts)

    def _forward(self, rows: list[Row], token_ids: list[int]) -> torch.Tensor:
        """One pass over any rows, without a graph; the tokens of those that sample, on the device."""
        device, table = self._device.device, self._table
        slots = [table.slot(row.request_id) for row in rows]
        lengths = [row.num_tokens for row in rows]
        metadata = AttentionMetadata.build(
            lengths,
            [row.start for row in rows],
            [table.block_ids[row.request_id] for row in rows],
            self._block_size,
            device,
        )
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
        if PENDING in token_ids:
            of_row = torch.tensor(slots, device=device).repeat_interleave(torch.tensor(lengths, device=device))
            tokens = torch.where(tokens == PENDING, table.sampler.last_tokens[of_row], tokens)
        chosen = [i for i, row in enumerate(rows) if row.sample]
        ends = torch.tensor(lengths).cumsum(0) - 1
        logits = self._decoder(tokens, metadata, self._kv, ends[chosen].to(device))
        if not chosen:
            return torch.empty(0, dtype=torch.int64, device=device)
        positions = [rows[i].start + rows[i].num_tokens for i in chosen]
        sampled, _ = sample(
            logits,
            torch.tensor([slots[i] for i in chosen], dtype=torch.int32, device=device),
            torch.tensor(positions, device=device),
            table.sampler,
        )
        return sampled

    def _warm_up(self) -> None:
        """Run every kernel once in every form in which serving without graphs will ask for it.

        Those are two: rows of one token, and longer ones; and with compressed weights products of a few tokens have
        tiles of several sizes. What a kernel does at run time makes no other form of it. Block 0 is written, before
        anybody owns it.
        """
        sequence = JoiningSequence(
            request_id=-1, prompt_ids=[0, 0], block_ids=[0], stop_token_ids=[], sampling=SamplerSettings()
        )
        self._table.admit(IterationBatch(iteration_id=0, rows=[], token_ids=[], joining=[sequence]))
        for tokens in (1, 2):
            self._forward([Row(-1, 0, tokens)], [0] * tokens)
        for tokens in LINEAR_TOKENS if self._decoder.compressed else ():
            self._forward([Row(-1, 0, 2), *[Row(-1, 0, 2, False)] * (tokens // 2 - 1)], [0] * tokens)
        self._table.admit(IterationBatch(iteration_id=0, rows=[], token_ids=[], dropped=[-1]))
