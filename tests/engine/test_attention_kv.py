"""The K/V pool in every dtype: what it takes, and blocks that are copied whole, scales included."""

from __future__ import annotations

import pytest
import torch

from bench.model import open_model
from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.models.spec import ModelSpec

BLOCK = 16


def test_int8_holds_about_twice_the_slots(smollm2):
    slots = {}
    for dtype in ("auto", "int8"):
        pool = {"memory": "16MiB", "dtype": dtype}
        slots[dtype] = open_model(model=str(smollm2), dtype="bfloat16", kv_cache=pool).info.n_slots
    # Two bytes for each of 64 elements, against one, and four for their scale.
    assert slots["int8"] / slots["auto"] == pytest.approx(128 / 68, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_move_with_all_that_belongs_to_them(tiny_llama, dtype):
    kv = AttentionKV(ModelSpec.read(tiny_llama), 6 * BLOCK, dtype, block_size=BLOCK, num_swap_slots=2 * BLOCK)
    for tensor in kv.tensors:
        tensor.copy_(torch.randint(-100, 100, tensor.shape))
    before = [tensor.clone() for tensor in kv.tensors]
    kv.swap_out([(5, 1), (0, 0)])
    kv.copy_blocks([(1, 0), (0, 5)])
    kv.swap_in([(0, 2), (1, 4)])
    origin = [1, 1, 0, 3, 5, 0]  # of the blocks 0 to 5
    for tensor, old in zip(kv.tensors, before, strict=True):
        moved = old.view(6, BLOCK, *old.shape[1:])[origin].view_as(tensor)
        assert torch.equal(tensor, moved)
