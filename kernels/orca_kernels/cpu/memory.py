"""Memory for what is streamed in every iteration, weights and K/V: zero, on CPU, in huge pages where Linux has them.

With pages of 4 KiB a large part of the streaming time goes into finding them, on a virtual machine most of all.
"""

from __future__ import annotations

import mmap
from math import prod

import torch

_HUGE = 2 << 20
_CHUNK = 32 << 20
_LINE = 64

_rest = memoryview(b"")  # of the newest chunk


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """As torch.zeros, at a multiple of 64 bytes. Tensors share chunks; a chunk is freed with the last of them."""
    global _rest
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    taken = -(-size // _LINE) * _LINE
    chunk = _rest if taken <= len(_rest) else _huge_pages(max(_CHUNK, taken))
    if len(chunk) - taken > len(_rest) or chunk is _rest:
        _rest = chunk[taken:]
    return torch.frombuffer(chunk[:size], dtype=dtype).view(shape)


def _huge_pages(size: int) -> memoryview:
    """Memory of `size` bytes, rounded up to huge pages and beginning with one.

    Touched here, because a huge page takes a tenth of a millisecond to appear: not while requests are served.
    """
    size = -(-size // _HUGE) * _HUGE
    pages = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).zero_().data_ptr() % _HUGE
    return memoryview(pages)[start : start + size]
