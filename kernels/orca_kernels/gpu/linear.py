"""Products with weights of 16, 8 or 4 bits in the Triton language, for the few tokens of a decode iteration.

Legend: t tokens, n inputs, m outputs. The weight is the LEFT operand: its rows fill the 64 of a matrix instruction,
and as few as 16 tokens waste nothing. Where the outputs do not fill the GPU the inputs are split as well, and a second
kernel adds the parts in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from orca_kernels import dispatch
from orca_kernels.aot import Launch
from orca_kernels.constants import MULTIPROCESSORS, LaunchConstants, LinearConstants, linear_constants
from orca_kernels.linear import GROUP, PACK, QuantizedWeight

_KINDS = {None: 0, "int8_weight": 1, "fp8_weight": 2, "int4_weight": 3}
_PLAIN, _INT8, _FP8, _INT4 = (tl.constexpr(i) for i in range(4))


@triton.jit
def _decode_fp8(bits):
    """Float16 of 1/256 of the float8_e4m3 in `bits` (uint8): the exponents' biases are 7 and 15. Exact."""
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _decode_int4(digits, scales_ptr, offsets_ptr, rows, inside, groups, first, BLOCK_M, HALF, GROUP):
    """Weights [BLOCK_M, HALF], float32, of 4-bit `digits` whose first input begins group `first`."""
    index = first + tl.arange(0, HALF // GROUP)
    at = rows[:, None] * groups + index[None, :]
    mask = inside[:, None] & (index < groups)[None, :]
    scale = tl.load(scales_ptr + at, mask=mask, other=0.0)
    offset = tl.load(offsets_ptr + at, mask=mask, other=0.0)
    grouped = tl.reshape(digits.to(tl.float32), (BLOCK_M, HALF // GROUP, GROUP))
    return tl.reshape(grouped * scale[:, :, None] + offset[:, :, None], (BLOCK_M, HALF))


@triton.jit(do_not_specialize=["t"])
def linear_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    t,
    m,
    n,
    groups,
    split,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Outputs of a block of tokens (axis 0) and of outputs (axis 1) over `split` inputs (axis 2).

    With PARTS the sums go to `out` [axis 2, t, m] as float32, unbiased; else biased and rounded to [t, m].
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    here, inside = tokens < t, rows < m
    tokens = tokens.to(tl.int64)
    rows = rows.to(tl.int64)
    begin = tl.program_id(2) * split
    end = tl.minimum(begin + split, n)
    acc = tl.zeros((BLOCK_M, BLOCK_T), dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        if KIND == _INT4:
            HALF: tl.constexpr = BLOCK_N // 2
            within = tl.arange(0, HALF)
            # Packed runs are whole: bytes beyond n exist, and meet zeros of x.
            packed = tl.load(
                values_ptr + rows[:, None] * (groups * GROUP // 2) + (start // 2 + within)[None, :],
                mask=inside[:, None],
                other=0,
            )
            for part in tl.static_range(2):
                columns = start + part * HALF + within
                x = tl.load(
                    x_ptr + tokens[None, :] * n + columns[:, None],
                    mask=here[None, :] & (columns < n)[:, None],
                    other=0.0,
                )
                first = (start + part * HALF) // GROUP
                digits = (packed >> (4 * part)) & 15
                w = _decode_int4(digits, scales_ptr, offsets_ptr, rows, inside, groups, first, BLOCK_M, HALF, GROUP).to(
                    x.dtype
                )
                if UPCAST:
                    acc += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
                else:
                    acc += tl.dot(w, x, input_precision="ieee")
        else:
            columns = start + tl.arange(0, BLOCK_N)
            x = tl.load(
                x_ptr + tokens[None, :] * n + columns[:, None], mask=here[None, :] & (columns < n)[:, None], other=0.0
            )
            w = tl.load(
                values_ptr + rows[:, None] * n + columns[None, :],
                mask=inside[:, None] & (columns < n)[None, :],
                other=0,
            )
            if KIND == _FP8:
                w = _decode_fp8(w)
            if UPCAST:
                acc += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
            else:
                acc += tl.dot(w.to(x.dtype), x, input_precision="ieee")
    if KIND == _INT8:
        acc *= tl.load(scales_ptr + rows, mask=inside, other=0.0)[:, None]
    if KIND == _FP8:
        acc *= tl.load(scales_ptr + rows, mask=inside, other=0.0)[:, None] * 256.0
    where = tokens[:, None] * m + rows[None, :]
    mask = here[:, None] & inside[None, :]
    if PARTS:
        tl.store(out_ptr + tl.program_id(2).to(tl.int64) * t * m + where, tl.trans(acc), mask=mask)
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + where, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["t"])
def add_parts_kernel(parts_ptr, bias_ptr, out_ptr, t, m, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Row by row: out [t, m] = the sum of `parts` [PARTS, t, m], in order, + bias."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < m
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + (part * t + row) * m + columns, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * m + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


_ADD_BLOCK = 1024
_ADD_CONSTANTS = LaunchConstants(num_warps=4)


def linear(
    x_tn: torch.Tensor,
    weight_mn: torch.Tensor | QuantizedWeight,
    bias_m: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """As the public function, for any t; `deterministic`: one tile for every t, and inputs in one part."""
    quantized = weight_mn if isinstance(weight_mn, QuantizedWeight) else None
    values = weight_mn.values if isinstance(weight_mn, QuantizedWeight) else weight_mn
    x_tn = x_tn.contiguous()
    (t, n), m = x_tn.shape, values.shape[0]
    architecture = dispatch.architecture(x_tn.device)
    constants = linear_constants(architecture, t, values.dtype.itemsize, deterministic=deterministic)
    parts, split = (1, n) if deterministic else _split(architecture, m, n, constants)
    out = x_tn.new_empty(t, m)
    partial = x_tn.new_empty(parts, t, m, dtype=torch.float32) if parts > 1 else out
    grid = (triton.cdiv(t, constants.block_t), triton.cdiv(m, constants.block_m), parts)
    linear_kernel[grid](
        x_tn,
        values,
        None if quantized is None else quantized.scales,
        None if quantized is None else quantized.offsets,
        None if parts > 1 else bias_m,
        partial,
        t,
        m,
        n,
        triton.cdiv(n, PACK) * (PACK // GROUP),
        split,
        KIND=_KINDS[None if quantized is None else quantized.kind],
        PARTS=parts > 1,
        UPCAST=dispatch.interpreted() or x_tn.dtype == torch.float32,
        GROUP=GROUP,
        BLOCK_T=constants.block_t,
        BLOCK_M=constants.block_m,
        BLOCK_N=constants.block_n,
        **constants.options,
    )
    if parts > 1:
        blocks = triton.cdiv(m, _ADD_BLOCK)
        add_parts_kernel[(t, blocks)](
            partial, bias_m, out, t, m, PARTS=parts, BLOCK=_ADD_BLOCK, **_ADD_CONSTANTS.options
        )
    return out


def _split(architecture: int, m: int, n: int, constants: LinearConstants) -> tuple[int, int]:
    """Parts of the inputs (a power of 2; the last may be empty), and inputs of a part: enough programs for every
    multiprocessor to have `constants.programs`.
    """
    wanted = constants.programs * MULTIPROCESSORS[architecture] // triton.cdiv(m, constants.block_m)
    steps = triton.cdiv(n, constants.block_n)
    parts = 1
    while parts * 2 <= min(wanted, steps // 2, 16):
        parts *= 2
    return parts, triton.cdiv(steps, parts) * constants.block_n


def launches(architecture: int) -> Iterator[Launch]:
    """Every tile with every kind of weight."""
    for kind, code in _KINDS.items():
        values = {None: "*bf16:16", "int8_weight": "*i8:16"}.get(kind, "*u8:16")
        itemsize = 2 if kind is None else 1
        tiles = {linear_constants(architecture, t, itemsize) for t in (1, 32, 64)} if kind else set()
        for constants in [*tiles, linear_constants(architecture, 1, itemsize, deterministic=True)]:
            for parts in (False, True) if constants in tiles else (False,):
                yield Launch(
                    name=f"linear {kind or 'bf16'} t={constants.block_t} parts={parts}",
                    kernel=linear_kernel,
                    arguments={
                        "x_ptr": "*bf16:16",
                        "values_ptr": values,
                        "scales_ptr": "*fp32:16" if kind else None,
                        "offsets_ptr": "*fp32:16" if kind == "int4_weight" else None,
                        "bias_ptr": None if parts else "*bf16:16",
                        "out_ptr": "*fp32:16" if parts else "*bf16:16",
                        "t": "i32",
                        "m": "i32:16",
                        "n": "i32:16",
                        "groups": "i32:16",
                        "split": "i32:16",
                        "KIND": code,
                        "PARTS": parts,
                        "UPCAST": False,
                        "GROUP": GROUP,
                        "BLOCK_T": constants.block_t,
                        "BLOCK_M": constants.block_m,
                        "BLOCK_N": constants.block_n,
                    },
                    constants=constants,
                    uses_dot=True,
                    # Blackwell: the compiler reads 4-bit weights 8 bytes at a time, which is left to tune on a card.
                    wide_loads=not (kind == "int4_weight" and architecture == 100),
                )
    for number in (2, 4, 8, 16):
        pointers = {"parts_ptr": "*fp32:16", "bias_ptr": "*bf16:16", "out_ptr": "*bf16:16", "t": "i32", "m": "i32:16"}
        yield Launch(
            f"linear add {number} parts",
            add_parts_kernel,
            {**pointers, "PARTS": number, "BLOCK": _ADD_BLOCK},
            _ADD_CONSTANTS,
            wide_loads=True,
        )
