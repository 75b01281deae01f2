"""Selective batching: the tokens of all rows of an iteration as one flat batch (paper, section 3.2).

Everything but attention sees a flat [T, H] tensor. Split and Merge around attention are not copies but offsets into it:
the `AttentionMetadata` built here once per iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from orca_backend.scheduler.iteration import IterationBatch
from orca_kernels.attention import AttentionMetadata


@dataclass(frozen=True, eq=False)
class FlatBatch:
    """One iteration as tensors.

    token_ids: int64 [T]. metadata: where each token stands. logits_rows: int64 [R], flat index of the last token of
    each row that samples; sampling_rows: the index into `IterationBatch.rows` of each of these.
    """

    token_ids: torch.Tensor
    metadata: AttentionMetadata
    logits_rows: torch.Tensor
    sampling_rows: list[int]


def flatten(
    batch: IterationBatch, block_tables: Mapping[int, list[int]], block_size: int, device: torch.device
) -> FlatBatch:
    """Lay out `batch`; `block_tables` maps request id to block ids. Raises ValueError if tokens and rows disagree."""
    rows = batch.rows
    lengths = [row.num_tokens for row in rows]
    if sum(lengths) != len(batch.token_ids):
        raise ValueError(f"iteration {batch.iteration_id}: {len(batch.token_ids)} tokens for {sum(lengths)} positions")
    sampling_rows = [i for i, row in enumerate(rows) if row.sample]
    last = -1
    ends = [last := last + length for length in lengths]
    return FlatBatch(
        token_ids=torch.tensor(batch.token_ids, dtype=torch.int64, device=device),
        metadata=AttentionMetadata.build(
            lengths,
            [row.start for row in rows],
            [block_tables[row.request_id] for row in rows],
            block_size,
            device,
        ),
        logits_rows=torch.tensor([ends[i] for i in sampling_rows], dtype=torch.int64, device=device),
        sampling_rows=sampling_rows,
    )
