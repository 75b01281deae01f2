"""Which implementation the public functions call: one choice for the whole process, made when the engine starts.

By default tensors on a GPU go to the kernels in the Triton language, all others to plain torch. The Triton language
also runs on CPU tensors, slowly, in its interpreter: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal

import torch

Backend = Literal["auto", "torch", "triton"]

_backend: Backend = "auto"
_deterministic = False


def configure(backend: Backend = "auto", *, deterministic: bool = False) -> None:
    """Choose for this process; `deterministic`: the same bits for a request alone and in any batch, at some cost."""
    global _backend, _deterministic
    _backend, _deterministic = backend, deterministic


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an operator on `tensor` goes to the Triton language."""
    return _backend == "triton" or (_backend == "auto" and tensor.is_cuda)


def obstacle(dtype: torch.dtype, device: torch.device, *, float8: bool = False) -> str | None:
    """Why the kernels in the Triton language cannot compute in `dtype` on `device` (K/V in `float8`), or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"they need a GPU, the device is {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"they compute in float16 and bfloat16, the dtype is {dtype}"
    if float8 and torch.cuda.get_device_capability(device) < (8, 9):
        return "float8 needs compute capability 8.9"
    return None


def deterministic() -> bool:
    """Whether results must not depend on the batch: fixed tiles, no split reductions."""
    return _deterministic


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. It cannot compute in bfloat16: kernels then compute in float32."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def architecture(device: torch.device) -> int:
    """The row of the tables of launch constants for `device`: 80, 90 or 100.

    Consumer cards of any generation (8.6, 8.9, 12.x) and the interpreter take 80: the least shared memory.
    """
    if device.type != "cuda":
        return 80
    return {9: 90, 10: 100}.get(torch.cuda.get_device_capability(device)[0], 80)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU. The interpreter, which runs one program after the other, behaves like a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
