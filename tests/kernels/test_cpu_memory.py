"""Memory in huge pages: zero, apart from one another, aligned, given back."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from orca_kernels.cpu import memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_tensors_are_zero_and_apart(dtype):
    shapes = [(3,), (5, 7), (1000, 1000), (0, 4), (17, 1024, 1024), (1,), (40, 1024, 1024), (2, 3)]
    tensors = [memory.zeros(*shape, dtype=dtype) for shape in shapes]
    for index, tensor in enumerate(tensors):
        assert tensor.shape == shapes[index]
        assert tensor.dtype == dtype
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(index + 1)
    for index, tensor in enumerate(tensors):
        assert (tensor == index + 1).all()


def test_memory_goes_back_with_the_last_tensor():
    process = psutil.Process()
    before = process.memory_info().rss
    tensors = [memory.zeros(64 << 20, dtype=torch.int8).fill_(1) for _ in range(4)]
    assert process.memory_info().rss - before > 200 << 20
    del tensors
    gc.collect()
    assert process.memory_info().rss - before < 40 << 20
