"""Ragged attention in the Triton language, in its interpreter, against the specification."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from test_attention import MIXED, fill, query

import orca_kernels
from orca_kernels import AttentionMetadata, ragged_attention, ragged_attention_reference
from orca_kernels.constants import MAX_SEGMENTS, attention_segments

DECODE = [(1, 0), (1, 14), (1, 15), (1, 16), (1, 200)]
# A long prompt and a chunk of one beside decodes; tiles and query blocks end anywhere in them.
LONG = [(1, 299), (300, 0), (37, 100), (1, 0)]


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    orca_kernels.configure("triton")
    yield
    orca_kernels.configure()


# Pairwise: every head size, group (query heads of a K/V head), page and option at least once in each phase.
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "block_size", "options"),
    [
        (MIXED, 3, 1, 64, 16, {}),
        (MIXED, 4, 4, 80, 64, {"window": 16}),
        (MIXED, 8, 2, 96, 16, {"softcap": 5.0}),
        (MIXED, 8, 1, 128, 32, {}),
        (MIXED, 7, 1, 256, 16, {"window": 17, "softcap": 5.0}),
        (LONG, 6, 2, 12, 16, {"window": 15}),
        (LONG, 8, 1, 64, 512, {}),
        (DECODE, 4, 4, 64, 16, {"window": 15}),
        (DECODE, 3, 1, 80, 16, {"window": 16}),
        (DECODE, 8, 1, 128, 32, {"window": 17, "softcap": 5.0}),
        (DECODE, 4, 1, 256, 512, {}),
    ],
)
def test_rows_equal_the_specification(rows, heads, kv_heads, dim, block_size, options):
    metadata, k_cache, v_cache = fill(rows, block_size, kv_heads, dim, torch.float32)
    q = query(rows, heads, dim, torch.float32)
    expected = ragged_attention_reference(q, k_cache, v_cache, metadata, dim**-0.5, **options)
    actual = ragged_attention(q, k_cache, v_cache, metadata, dim**-0.5, **options)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [MIXED, DECODE])
def test_sixteen_bit_rows_stay_near_float32_of_the_same_inputs(dtype, rows):
    metadata, k_cache, v_cache = fill(rows, 16, 1, 64, dtype)
    q = query(rows, 3, 64, dtype)
    expected = ragged_attention_reference(q.float(), k_cache.float(), v_cache.float(), metadata, 0.125)
    actual = ragged_attention(q, k_cache, v_cache, metadata, 0.125)
    assert actual.dtype == dtype
    ratio = (actual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # The interpreter rounds to bfloat16 towards zero, where a GPU rounds to nearest: twice the error.
    assert ratio < {torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize(("rows", "pool"), [(MIXED, torch.int8), (DECODE, torch.float8_e4m3fn)])
def test_quantized_pools_are_read_with_their_scales(rows, pool):
    metadata, k_float, v_float = fill(rows, 16, 2, 64, torch.float32)
    k_cache, v_cache = torch.zeros(2, *k_float.shape).to(pool)
    k_scale, v_scale = torch.full((2, *k_float.shape[:2]), float("nan"))
    written = torch.cat([row.slots for row in metadata.rows])
    orca_kernels.kv_write(k_float[written], v_float[written], k_cache, v_cache, written, k_scale, v_scale)
    q = query(rows, 4, 64, torch.float32)
    arguments = (q, k_cache, v_cache, metadata, 0.125)
    scales = {"k_scale_sk": k_scale, "v_scale_sk": v_scale}
    expected = ragged_attention_reference(*arguments, **scales)
    torch.testing.assert_close(ragged_attention(*arguments, **scales), expected, rtol=1e-5, atol=5e-6)
    exact = ragged_attention_reference(q, k_float, v_float, metadata, 0.125)
    ratio = (expected - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert ratio < (0.02 if pool == torch.int8 else 0.06)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rows", [[(1, 100), (1, 64)], [(5, 100), (1, 64)]])
def test_keys_before_every_window_are_never_read(rows, backend):
    """Their blocks may have been given to others."""
    orca_kernels.configure(backend)
    metadata, k_cache, v_cache = fill(rows, 16, 1, 64, torch.float32)
    q = query(rows, 3, 64, torch.float32)
    expected = ragged_attention_reference(q, k_cache, v_cache, metadata, 0.125, window=20)
    for row, (_, start) in zip(metadata.rows, rows, strict=True):
        k_cache[row.slots[: start - 19]] = v_cache[row.slots[: start - 19]] = float("nan")
    actual = ragged_attention(q, k_cache, v_cache, metadata, 0.125, window=20)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("rows", [[(5, 20), (1, 3)], [(1, 20), (1, 3)]])
def test_padding_rows_give_zeros_and_change_nothing(rows):
    metadata, k_cache, v_cache = fill(rows, 16, 1, 64, torch.float32)
    q = query([*rows, (3, 0)], 3, 64, torch.float32)
    tokens = metadata.num_tokens
    padded = dataclasses.replace(
        metadata,
        query_start_loc=torch.cat([metadata.query_start_loc, torch.tensor([tokens + 1, tokens + 2, tokens + 3])]).int(),
        seq_lens=torch.cat([metadata.seq_lens, torch.zeros(3)]).int(),
        block_table=torch.cat([metadata.block_table, torch.full((3, metadata.block_table.shape[1]), -1)]).int(),
        query_lens=(*metadata.query_lens, 1, 1, 1),
    )
    actual = ragged_attention(q, k_cache, v_cache, padded, 0.125)
    expected = ragged_attention_reference(q[:tokens], k_cache, v_cache, metadata, 0.125)
    torch.testing.assert_close(actual[:tokens], expected, rtol=1e-5, atol=5e-6)
    assert torch.equal(actual[tokens:], torch.zeros(3, 3, 64))


def test_deterministic_bits_depend_neither_on_the_batch_nor_on_chunks():
    """One request alone, token by token, in company in any order, and its prompt in two chunks."""
    orca_kernels.configure("triton", deterministic=True)
    rows = [(40, 0), (1, 70), (7, 20)]
    metadata, k_cache, v_cache = fill(rows, 16, 1, 64, torch.float32)
    q = query(rows, 3, 64, torch.float32)
    together = ragged_attention(q, k_cache, v_cache, metadata, 0.125).split([40, 1, 7])
    parts = q.split([40, 1, 7])

    def run(*pieces: tuple[int, int, int]) -> list[torch.Tensor]:
        """Attention of pieces (row, first query token, tokens) in one call."""
        lengths = [tokens for _, _, tokens in pieces]
        starts = [rows[row][1] + first for row, first, _ in pieces]
        chosen = AttentionMetadata.build(lengths, starts, [metadata.block_ids[row] for row, _, _ in pieces], 16)
        flat = torch.cat([parts[row][first : first + tokens] for row, first, tokens in pieces])
        return list(ragged_attention(flat, k_cache, v_cache, chosen, 0.125).split(lengths))

    assert torch.equal(run((1, 0, 1))[0], together[1])
    last, first, middle = run((2, 0, 7), (0, 0, 40), (1, 0, 1))
    assert torch.equal(first, together[0])
    assert torch.equal(middle, together[1])
    assert torch.equal(last, together[2])
    assert torch.equal(torch.cat([*run((0, 0, 13)), *run((0, 13, 27), (1, 0, 1))[:1]]), together[0])
    assert torch.equal(run((0, 39, 1))[0], together[0][39:])


@pytest.mark.parametrize("multiprocessors", [8, 108, 132])
def test_few_rows_are_split_until_every_multiprocessor_has_work(multiprocessors):
    for rows, kv_heads in ((1, 1), (1, 8), (8, 8), (32, 8), (64, 40)):
        segments = attention_segments(rows, kv_heads, multiprocessors)
        programs = rows * kv_heads * segments
        assert segments == MAX_SEGMENTS or programs >= 2 * multiprocessors
        assert segments == 1 or programs < 4 * multiprocessors


def test_heads_that_no_kernel_has_are_refused():
    metadata, k_cache, v_cache = fill([(1, 0)], 16, 1, 512, torch.float32)
    with pytest.raises(ValueError, match="head size 512"):
        ragged_attention(query([(1, 0)], 1, 512, torch.float32), k_cache, v_cache, metadata, 1.0)
