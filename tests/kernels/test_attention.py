"""Ragged attention against its specification, on mixed rows over a scattered, NaN-poisoned pool."""

from __future__ import annotations

import random

import pytest
import torch

from orca_kernels import AttentionMetadata, kv_write, ragged_attention, ragged_attention_reference

# (query tokens, start): decode, prefill, chunk, first token alone, block edges of 16 and one beside them
MIXED = [(1, 40), (37, 0), (20, 33), (1, 0), (1, 14), (1, 15), (1, 16), (16, 0), (2, 15), (1, 200)]


def fill(
    rows: list[tuple[int, int]], block_size: int, kv_heads: int, dim: int, dtype: torch.dtype, contiguous: bool = False
) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor]:
    """Metadata and caches for `rows`: values depend only on (row, position), every unwritten slot is NaN."""
    needs = [-(-(length + start) // block_size) for length, start in rows]
    blocks = list(range(2 * sum(needs)))
    if not contiguous:
        random.Random(7).shuffle(blocks)
    tables = []
    for need in needs:
        tables.append(blocks[:need])
        del blocks[:need]
    num_slots = 2 * sum(needs) * block_size
    k_cache = torch.full((num_slots, kv_heads, dim), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    generator = torch.Generator().manual_seed(1)
    for (length, start), table in zip(rows, tables, strict=True):
        whole = AttentionMetadata.build([start + length], [0], [table], block_size)
        k, v = torch.randn(2, start + length, kv_heads, dim, generator=generator).to(dtype)
        kv_write(k, v, k_cache, v_cache, whole.slot_mapping)
    metadata = AttentionMetadata.build([r[0] for r in rows], [r[1] for r in rows], tables, block_size)
    return metadata, k_cache, v_cache


def query(rows: list[tuple[int, int]], heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sum(r[0] for r in rows), heads, dim, generator=generator).to(dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (7, 1, 16), (16, 2, 128)])
@pytest.mark.parametrize("block_size", [16, 1, 7])
def test_mixed_rows_equal_the_specification(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    metadata, k_cache, v_cache = fill(MIXED, block_size, kv_heads, dim, torch.float32)
    q = query(MIXED, heads, dim, torch.float32)
    expected = ragged_attention_reference(q, k_cache, v_cache, metadata, dim**-0.5)
    actual = ragged_attention(q, k_cache, v_cache, metadata, dim**-0.5)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rows_stay_near_float32_of_the_same_inputs(dtype: torch.dtype) -> None:
    metadata, k_cache, v_cache = fill(MIXED, 16, 3, 64, dtype)
    q = query(MIXED, 9, 64, dtype)
    expected = ragged_attention_reference(q.float(), k_cache.float(), v_cache.float(), metadata, 0.125)
    actual = ragged_attention(q, k_cache, v_cache, metadata, 0.125)
    assert actual.dtype == dtype
    ratio = (actual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert ratio < {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]


def test_the_specification_is_textbook_attention() -> None:
    metadata, k_cache, v_cache = fill([(6, 0)], 4, 2, 8, torch.float64, contiguous=True)
    q = query([(6, 0)], 4, 8, torch.float64)
    actual = ragged_attention_reference(q, k_cache, v_cache, metadata, 0.5)
    for token in range(6):
        for head in range(4):
            k, v = k_cache[: token + 1, head // 2], v_cache[: token + 1, head // 2]
            expected = (0.5 * k @ q[token, head]).softmax(0) @ v
            torch.testing.assert_close(actual[token, head], expected, rtol=1e-5, atol=1e-6)


def test_paged_equals_contiguous() -> None:
    q = query(MIXED, 9, 64, torch.float32)
    results = [
        ragged_attention(q, k_cache, v_cache, metadata, 0.125)
        for metadata, k_cache, v_cache in (
            fill(MIXED, 16, 3, 64, torch.float32),
            fill(MIXED, 256, 3, 64, torch.float32, contiguous=True),
        )
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_every_row_alone_equals_the_batch() -> None:
    metadata, k_cache, v_cache = fill(MIXED, 16, 3, 64, torch.float32)
    q = query(MIXED, 9, 64, torch.float32)
    together = ragged_attention(q, k_cache, v_cache, metadata, 0.125)
    first = 0
    for row, (length, start) in enumerate(MIXED):
        single = AttentionMetadata.build([length], [start], [metadata.block_ids[row]], 16)
        alone = ragged_attention(q[first : first + length], k_cache, v_cache, single, 0.125)
        torch.testing.assert_close(together[first : first + length], alone, rtol=1e-5, atol=1e-6)
        first += length


def test_metadata_describes_slots_and_positions() -> None:
    metadata = AttentionMetadata.build([3, 1], [2, 4], [[5, 0], [2, 9, 7]], 4)
    assert metadata.slot_mapping.tolist() == [22, 23, 0, 36]
    assert metadata.positions.tolist() == [2, 3, 4, 4]
    assert metadata.query_start_loc.tolist() == [0, 3, 4]
    assert metadata.seq_lens.tolist() == [5, 5]
    assert metadata.block_table.tolist() == [[5, 0], [2, 9]]
    assert metadata.rows[0].slots.tolist() == [20, 21, 22, 23, 0]


@pytest.mark.parametrize(
    ("lengths", "starts", "blocks"),
    [([], [], []), ([0], [0], [[1]]), ([5], [0], [[1]]), ([1], [4], [[1]]), ([1, 1], [0], [[1]])],
)
def test_impossible_rows_are_refused(lengths: list[int], starts: list[int], blocks: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="row"):
        AttentionMetadata.build(lengths, starts, blocks, 4)
