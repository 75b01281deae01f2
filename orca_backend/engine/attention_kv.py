"""AttentionKV: the tensors of the paper's attention K/V manager. Who owns which slot is the scheduler's business."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from orca_backend.models.spec import ModelSpec
from orca_kernels.cpu import memory
from orca_kernels.kv_write import QUANTIZED_MAX


class LayerKV(NamedTuple):
    """The pool of one layer: keys and values [slots, kv heads, head dim], and scales [slots, kv heads] if quantized."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that there are."""
        return [tensor for tensor in self if tensor is not None]


class AttentionKV:
    """Keys and values of every layer, allocated once.

    One slot holds one token. A pool in int8 or float8 is quantized: every token and head has a scale, float32.
    Everything is zero at start, so that a page that was never written is at least finite.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        head_dim_multiple: int = 1,
        *,
        block_size: int = 1,
        num_swap_slots: int = 0,
    ) -> None:
        """Allocate; the head dim is padded to `head_dim_multiple`. Swap slots are in host memory.

        Raises ValueError for no slots, RuntimeError or torch.OutOfMemoryError if memory is short.
        """
        if num_slots < 1:
            raise ValueError(f"the K/V pool needs at least one slot, got {num_slots}")
        heads, width = spec.num_kv_heads, _padded(spec.head_dim, head_dim_multiple)

        def allocate(slots: int, device: torch.device | str) -> LayerKV:
            zeros = memory.zeros if torch.device(device).type == "cpu" else partial(torch.zeros, device=device)
            keys, values = (zeros(slots, heads, width, dtype=dtype) for _ in range(2))
            if dtype not in QUANTIZED_MAX:
                return LayerKV(keys, values, None, None)
            return LayerKV(keys, values, *(zeros(slots, heads, dtype=torch.float32) for _ in range(2)))

        self.layers = [allocate(num_slots, device) for _ in range(spec.num_layers)]
        self.num_slots = num_slots
        self._block_size = block_size
        self._swap = [allocate(num_swap_slots, "cpu") for _ in range(spec.num_layers)]

    @staticmethod
    def bytes_per_token(spec: ModelSpec, dtype: torch.dtype, head_dim_multiple: int = 1) -> int:
        """Bytes that one token takes over all layers, K and V."""
        head = _padded(spec.head_dim, head_dim_multiple) * dtype.itemsize
        scale = torch.float32.itemsize if dtype in QUANTIZED_MAX else 0
        return 2 * spec.num_layers * spec.num_kv_heads * (head + scale)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that is in the pool."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks within the pool, all at once: (from, to)."""
        self._copy(self.layers, self.layers, pairs)

    def move_blocks(
        self, swapped_out: list[tuple[int, int]], copied: list[tuple[int, int]], swapped_in: list[tuple[int, int]]
    ) -> None:
        """What an iteration moves before it runs, in this order: later moves may take the blocks of earlier ones."""
        self.swap_out(swapped_out)
        self.copy_blocks(copied)
        self.swap_in(swapped_in)

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks to host memory: (block, host block)."""
        self._copy(self.layers, self._swap, pairs)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks back: (host block, block)."""
        self._copy(self._swap, self.layers, pairs)

    def _copy(self, sources: list[LayerKV], targets: list[LayerKV], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        # A block is one run of memory whatever the layout of the slots in it.
        blocks = torch.tensor(pairs)
        for source_layer, target_layer in zip(sources, targets, strict=True):
            for source, target in zip(source_layer.tensors, target_layer.tensors, strict=True):
                rows = source.view(-1, self._block_size, *source.shape[1:])[blocks[:, 0].to(source.device)]
                target.view(-1, self._block_size, *target.shape[1:])[blocks[:, 1].to(target.device)] = rows.to(
                    target.device
                )


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
