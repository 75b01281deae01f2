"""SwiGLU and GeLU in the Triton language: elementwise, float32 inside, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from orca_kernels.aot import Launch
from orca_kernels.constants import LaunchConstants

BLOCK = 1024
_CONSTANTS = LaunchConstants(num_warps=4)


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, m, BLOCK: tl.constexpr):
    """Store silu(gate) * up, [t, m], of the packed x [t, gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < m
    gate = tl.load(x_ptr + row * 2 * m + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * m + m + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * m + columns, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_kernel(x_ptr, out_ptr, m, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """Store gelu(x), [t, m], by the error function or by GPT-2's hyperbolic tangent."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < m
    x = tl.load(x_ptr + row * m + columns, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        # 0.5 * (1 + tanh(y)) is sigmoid(2y): no tanh, which the interpreter lacks and which overflows as a quotient.
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x *= 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
    tl.store(out_ptr + row * m + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up_tn: torch.Tensor) -> torch.Tensor:
    """As the public function."""
    rows, width = gate_up_tn.shape
    out = gate_up_tn.new_empty(rows, width // 2)
    grid = (rows, triton.cdiv(width // 2, BLOCK))
    swiglu_kernel[grid](gate_up_tn.contiguous(), out, width // 2, BLOCK=BLOCK, **_CONSTANTS.options)
    return out


def gelu(x_tn: torch.Tensor, *, tanh: bool) -> torch.Tensor:
    """As the public function."""
    rows, width = x_tn.shape
    out = torch.empty_like(x_tn, memory_format=torch.contiguous_format)
    grid = (rows, triton.cdiv(width, BLOCK))
    gelu_kernel[grid](x_tn.contiguous(), out, width, TANH=tanh, BLOCK=BLOCK, **_CONSTANTS.options)
    return out


def launches(architecture: int) -> Iterator[Launch]:
    """All activations."""
    tensors: dict[str, Any] = {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", "m": "i32:16", "BLOCK": BLOCK}
    yield Launch("swiglu", swiglu_kernel, tensors, _CONSTANTS, wide_loads=True)
    for tanh in (False, True):
        yield Launch(f"gelu tanh={tanh}", gelu_kernel, {**tensors, "TANH": tanh}, _CONSTANTS, wide_loads=True)
