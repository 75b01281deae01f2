"""Ragged attention: the rows of one iteration (prefill, prompt chunk, decode) in one call over a paged K/V pool.

This is the Attention of selective batching (Orca, OSDI'22, section 3): Split is `query_start_loc` into the flat query,
Merge is writing into the flat output. Slot of token position p of a row: block_table[p // block_size] * block_size +
p % block_size. A row's query tokens are its LAST `query_len` positions (bottom-right causal).

Slots that no token of a row was written to may hold anything, NaN included: they are never part of a computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from orca_kernels.dispatch import use_triton


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where every token of one iteration is: built once from host lists, used by all layers.

    query_start_loc: int32 [r + 1], first flat token of each row, then t.
    seq_lens: int32 [r], tokens of the row including this iteration's.
    block_table: int32 [r, most blocks], padded with each row's first block.
    slot_mapping: int64 [t], where the token's K/V go.
    positions: int64 [t], position of the token in its sequence.
    query_lens, starts, block_ids: the same on the host, per row, so that nobody has to ask the device.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    block_size: int
    query_lens: tuple[int, ...]
    starts: tuple[int, ...]
    block_ids: tuple[Sequence[int], ...]

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        starts: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Describe rows of `query_lens[i]` tokens that begin at position `starts[i]` of a sequence in `block_ids[i]`.

        A row may own more blocks than it has filled. Raises ValueError for an empty row, no rows, or too few blocks.
        """
        if not query_lens or len(query_lens) != len(starts) or len(query_lens) != len(block_ids):
            raise ValueError(f"rows disagree: {len(query_lens)} lengths, {len(starts)} starts, {len(block_ids)} tables")
        query_start = [0]
        slots: list[int] = []
        positions: list[int] = []
        for row, (length, start, blocks) in enumerate(zip(query_lens, starts, block_ids, strict=True)):
            end = start + length
            if length < 1 or start < 0 or len(blocks) * block_size < end:
                raise ValueError(
                    f"row {row}: {length} tokens from {start} do not fit {len(blocks)} blocks of {block_size}"
                )
            query_start.append(query_start[-1] + length)
            positions.extend(range(start, end))
            slots.extend(blocks[p // block_size] * block_size + p % block_size for p in range(start, end))
        used = [-(-(start + length) // block_size) for length, start in zip(query_lens, starts, strict=True)]
        width = max(used)
        table = [list(b[:n]) + [b[0]] * (width - n) for b, n in zip(block_ids, used, strict=True)]
        seq_lens = [start + length for length, start in zip(query_lens, starts, strict=True)]
        return cls(
            query_start_loc=torch.tensor(query_start, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            block_size=block_size,
            query_lens=tuple(query_lens),
            starts=tuple(starts),
            block_ids=tuple(block_ids),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the iteration, t."""
        return sum(self.query_lens)

    @cached_property
    def max_query_len(self) -> int:
        """Query tokens of the longest row."""
        return max(self.query_lens)

    @cached_property
    def rows(self) -> tuple[RowPlan, ...]:
        """Index tensors of each row, made at the first layer and shared by the others."""
        offsets = torch.arange(self.block_size, device=self.block_table.device)
        slots = (self.block_table.long()[:, :, None] * self.block_size + offsets).flatten(1)
        plans = []
        first = 0
        for row, (length, start) in enumerate(zip(self.query_lens, self.starts, strict=True)):
            mask = None
            if length > 1 and start > 0:
                mask = torch.ones(length, start + length, dtype=torch.bool, device=slots.device).tril(start)
            plans.append(RowPlan(first, first + length, slots[row, : start + length], mask))
            first += length
        return tuple(plans)


@dataclass(frozen=True, eq=False)
class RowPlan:
    """A row: its flat range [first, last), the slots of all its tokens in order, int64 [seq_len], and its causal mask.

    `mask` (bool [query_len, seq_len], True where a key is seen) is there only for several tokens after position 0:
    one token sees every key, and for a row from position 0 torch's is_causal, which is top-left aligned, is right.
    """

    first: int
    last: int
    slots: torch.Tensor
    mask: torch.Tensor | None


def ragged_attention_reference(
    q_thd: torch.Tensor,
    k_cache_skd: torch.Tensor,
    v_cache_skd: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    k_scale_sk: torch.Tensor | None = None,
    v_scale_sk: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification: softmax(scale * q k^T, causal) v of every row by itself, in float32, rounded at the end."""
    out = torch.empty_like(q_thd)
    for row, length, start in zip(metadata.rows, metadata.query_lens, metadata.starts, strict=True):
        k = _gather(k_cache_skd, k_scale_sk, row.slots, torch.float32)
        v = _gather(v_cache_skd, v_scale_sk, row.slots, torch.float32)
        visible = _visible(length, start, window, q_thd.device)
        out[row.first : row.last] = _attend(q_thd[row.first : row.last].float(), k, v, visible, scale, softcap)
    return out


def ragged_attention(
    q_thd: torch.Tensor,
    k_cache_skd: torch.Tensor,
    v_cache_skd: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    k_scale_sk: torch.Tensor | None = None,
    v_scale_sk: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every row of the iteration over its own cached tokens, this iteration's included: [t, h, d].

    Query heads h are a multiple of K/V heads k; query heads i * h/k .. share K/V head i. The K/V of this iteration's
    tokens must have been written. `window`: a token sees that many, itself included. `softcap`: scores become
    softcap * tanh(score / softcap). Caches in int8 or float8_e4m3fn hold multiples of `k_scale_sk` and `v_scale_sk`,
    float32 [s, k] (`quantize_kv`). Same result as `ragged_attention_reference` up to rounding.
    """
    if use_triton(q_thd):
        from orca_kernels.gpu import attention

        return attention.ragged_attention(
            q_thd, k_cache_skd, v_cache_skd, metadata, scale, window, softcap, k_scale_sk, v_scale_sk
        )
    out = torch.empty_like(q_thd)
    for row, length, start in zip(metadata.rows, metadata.query_lens, metadata.starts, strict=True):
        slots, mask = row.slots, row.mask
        if window is not None and len(slots) > window:
            hidden = max(0, start + 1 - window)  # tokens that not even the first query token sees any more
            slots = slots[hidden:]
            mask = _visible(length, start, window, q_thd.device)[:, hidden:] if length > 1 else None
        q = q_thd[row.first : row.last]
        k_lkd = _gather(k_cache_skd, k_scale_sk, slots, q.dtype)
        v_lkd = _gather(v_cache_skd, v_scale_sk, slots, q.dtype)
        if softcap is not None:
            visible = torch.ones(length, len(slots), dtype=torch.bool, device=q.device) if mask is None else mask
            visible = visible.tril(len(slots) - length)
            out[row.first : row.last] = _attend(q.float(), k_lkd.float(), v_lkd.float(), visible, scale, softcap)
        elif length == 1:
            out[row.first] = _one_token(q[0], k_lkd, v_lkd, scale)
        else:
            out[row.first : row.last] = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k_lkd.transpose(0, 1)[None],
                v_lkd.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
    return out


def _gather(
    cache_skd: torch.Tensor, scale_sk: torch.Tensor | None, slots_l: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Keys or values of a row in order, [l, k, d], without their scales."""
    rows_lkd = cache_skd.index_select(0, slots_l)
    if scale_sk is None:
        return rows_lkd.to(dtype)
    return (rows_lkd.float() * scale_sk.index_select(0, slots_l)[:, :, None]).to(dtype)


def _visible(length: int, start: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of its row's keys a query token sees: bool [q, l], causal from the bottom right, at most `window` keys."""
    visible = torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)
    return visible if window is None else visible.triu(start + 1 - window)


def _attend(
    q_qhd: torch.Tensor,
    k_lkd: torch.Tensor,
    v_lkd: torch.Tensor,
    visible_ql: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """The formula, for one row in float32: [q, h, d]."""
    group = q_qhd.shape[1] // k_lkd.shape[1]
    k_lhd, v_lhd = k_lkd.repeat_interleave(group, dim=1), v_lkd.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,lhd->hql", q_qhd, k_lhd) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    probabilities = scores.masked_fill(~visible_ql, float("-inf")).softmax(dim=-1)
    return torch.einsum("hql,lhd->qhd", probabilities, v_lhd)


def _one_token(q_hd: torch.Tensor, k_lkd: torch.Tensor, v_lkd: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one query token over all of its row, [h, d]: the query heads of a K/V head form one small matrix.

    In float32 and row by row: on one CPU thread about 5 times faster than one product over rows padded to the longest.
    """
    q_kgd = q_hd.float().view(k_lkd.shape[1], -1, q_hd.shape[1])
    scores = (q_kgd * scale) @ k_lkd.float().permute(1, 2, 0)
    return (scores.softmax(dim=-1) @ v_lkd.float().transpose(0, 1)).view_as(q_hd)
