"""RMSNorm and LayerNorm in the Triton language, with the residual addition before them in the same pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from orca_kernels.aot import Launch
from orca_kernels.constants import NORM_WARPS, LaunchConstants


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n,
    eps,
    LAYER: tl.constexpr,
    ADD: tl.constexpr,
    GEMMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program: residual += x (ADD); out = norm(residual or x). Statistics in float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        # The sum is normalised as it is stored, so that fused and unfused paths agree in 16 bits.
        x += tl.load(residual_ptr + row * n + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * n + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, axis=0) / n, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / n + eps)
    if LAYER:
        x = x * weight + tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    elif GEMMA:
        x *= 1.0 + weight
    else:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_ptr + row * n + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def norm(
    x_tn: torch.Tensor,
    weight_n: torch.Tensor,
    bias_n: torch.Tensor | None,
    eps: float,
    *,
    residual_tn: torch.Tensor | None = None,
    gemma: bool = False,
) -> torch.Tensor:
    """LayerNorm with `bias_n`, RMSNorm without, of x or, updated in place first, of residual + x: [t, n].

    `residual_tn` must be contiguous. Raises ValueError for a row longer than one program can hold.
    """
    rows, n = x_tn.shape
    block = triton.next_power_of_2(n)
    x_tn = x_tn.contiguous()
    out = torch.empty_like(x_tn)
    norm_kernel[(rows,)](
        x_tn,
        residual_tn,
        weight_n,
        bias_n,
        out,
        n,
        eps,
        LAYER=bias_n is not None,
        ADD=residual_tn is not None,
        GEMMA=gemma,
        BLOCK=block,
        **_constants(block).options,
    )
    return out


def _constants(block: int) -> LaunchConstants:
    """Raises ValueError for a row longer than one program can hold."""
    for longest, warps in NORM_WARPS:
        if block <= longest:
            return LaunchConstants(warps)
    raise ValueError(f"a row of {block} values is longer than one program of the norm holds, {NORM_WARPS[-1][0]}")


def launches(architecture: int) -> Iterator[Launch]:
    """Every size of row, and every kind of norm at the hidden size of a 13B GPT and an 8B Llama."""
    shapes = [(longest, False, True, False, "bf16") for longest, _ in NORM_WARPS]
    shapes += [
        (5120, True, True, False, "fp16"),
        (4096, False, False, False, "bf16"),
        (4096, False, True, True, "bf16"),
    ]
    for n, layer, add, gemma, dtype in shapes:
        block = triton.next_power_of_2(n)
        pointer = f"*{dtype}:16"
        yield Launch(
            name=f"{'layer' if layer else 'gemma' if gemma else 'rms'}_norm n={n} add={add} {dtype}",
            kernel=norm_kernel,
            arguments={
                "x_ptr": pointer,
                "residual_ptr": pointer if add else None,
                "weight_ptr": pointer,
                "bias_ptr": pointer if layer else None,
                "out_ptr": pointer,
                "n": "i32:16",
                "eps": "fp32",
                "LAYER": layer,
                "ADD": add,
                "GEMMA": gemma,
                "BLOCK": block,
            },
            constants=_constants(block),
            wide_loads=True,
        )
