"""A decoder as a program of compiled operations: built once, then one call per iteration.

Legend: T = tokens of the iteration, R = tokens whose logits are wanted, V = vocabulary size. The operations are
those of csrc/program.h; the plain-torch functions of this package are their specification.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orca_kernels.attention import AttentionMetadata
from orca_kernels.cpu import build, memory

LANES = 16
PAGE = 16
GROUP = 64  # inputs that share their scales in 8-bit products


class Epilogue(enum.IntEnum):
    """What happens to a product: stored, added to the residual, or put through an activation."""

    STORE = 0
    ADD = 1
    SWIGLU = 2
    GELU_TANH = 3
    GELU_ERF = 4


class Buffer(enum.IntEnum):
    """The buffers between operations, all [T, width]."""

    HIDDEN = 0
    QKV = 1
    CONTEXT = 2
    MIDDLE = 3
    RESIDUAL = 4
    LOGITS = 5


class _Dimensions(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocabulary"))
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "wanted", "table_width", "block_size")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "slots", "query_start", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("block_table", "wanted_tokens", "logits")),
    ]


class _KVLayer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")]


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes that all operations share."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int


class _Weight(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "scales", "offsets")),
        *(
            (name, ctypes.c_int32)
            for name in ("columns", "packed_columns", "inputs", "zmm", "epilogue", "bits", "group")
        ),
    ]


class Quantization(enum.Enum):
    """How a weight is kept: as it is; for products of 8-bit integers; or compressed, expanded to be multiplied."""

    NONE = "none"
    INT8 = "int8"
    INT8_WEIGHT = "int8_weight"
    INT4_WEIGHT = "int4_weight"

    @property
    def bits(self) -> int:
        """Bits of a compressed weight, else 0."""
        return {Quantization.INT8_WEIGHT: 8, Quantization.INT4_WEIGHT: 4}.get(self, 0)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 32 if self is Quantization.INT4_WEIGHT else GROUP


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A weight in panels. `outputs` and `inputs` as in the source weight [outputs, inputs].

    `scales` (float32) is [groups of inputs, packed columns], or with INT8, whose inputs must be quantized, [panels,
    groups, columns of a panel]. With 4 bits `offsets` (float32) has the shape of `scales`.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    offsets: torch.Tensor | None
    outputs: int
    inputs: int
    packed_columns: int
    zmm: int
    epilogue: Epilogue
    quantization: Quantization

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All that the library points into."""
        return self.panels, self.bias, self.scales, self.offsets

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def descriptor(self) -> _Weight:
        """The weight as the library sees it."""
        return _Weight(
            *(_pointer(tensor) for tensor in self.tensors),
            self.outputs // 2 if self.epilogue is Epilogue.SWIGLU else self.outputs,
            self.packed_columns,
            self.inputs,
            self.zmm,
            int(self.epilogue),
            self.quantization.bits,
            self.quantization.group if self.quantization.bits else 0,
        )


_PREFIX = {torch.float32: "orca_float32", torch.bfloat16: "orca_bfloat16"}


def obstacle(dtype: torch.dtype) -> str | None:
    """Why this machine cannot run programs of `dtype`, or None if it can (the library is then built)."""
    try:
        library = build.load()
    except build.CompilerError as error:
        return str(error)
    if dtype not in _PREFIX or not hasattr(library, _PREFIX[dtype] + "_run"):
        return f"no compiled kernels for {dtype} on this CPU"
    return None


def _function(dtype: torch.dtype, name: str) -> ctypes._NamedFuncPointer:
    return getattr(build.load(), f"{_PREFIX[dtype]}_{name}")


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    if tensor is None:
        return ctypes.c_void_p(None)
    if not tensor.is_contiguous():
        raise ValueError("compiled operations need contiguous tensors")
    return ctypes.c_void_p(tensor.data_ptr())


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: Epilogue = Epilogue.STORE,
    quantization: Quantization = Quantization.NONE,
) -> PackedLinear:
    """Pack a weight [outputs, inputs] of float32 or bfloat16 on CPU; `bias` [outputs].

    With SWIGLU the weight is gate and up stacked, and the linear has outputs / 2 columns. Quantized weights are
    rounded with one scale per output and group of inputs. Raises ValueError for 4 bits and an odd number of inputs.
    """
    outputs, inputs = weight.shape
    dtype = weight.dtype
    unit = 4 // dtype.itemsize
    swiglu = epilogue is Epilogue.SWIGLU
    columns = -(-(outputs // 2) // (LANES // 2)) * LANES if swiglu else -(-outputs // LANES) * LANES
    zmm = 3 if columns % (3 * LANES) == 0 else 2 if quantization is Quantization.INT8 else 4
    padded = -(-columns // (zmm * LANES)) * zmm * LANES
    scales = offsets = None
    if quantization is not Quantization.NONE:

        def pack_groups(values_og: torch.Tensor) -> torch.Tensor:
            """[outputs, groups] to [groups, packed columns], each repeated for the inputs of a unit if expanded."""
            packed = torch.stack([_pack_columns(row, columns, padded, swiglu) for row in values_og.t()])
            return packed.repeat_interleave(unit, dim=1) if quantization.bits else packed

        weight, scale, offset = _round_in_groups(weight, quantization)
        scales = pack_groups(scale)
        if offset is not None:
            offsets = pack_groups(offset)
        if quantization is Quantization.INT8:
            unit = 4
            scales = scales.view(len(scales), -1, zmm * LANES).transpose(0, 1).contiguous()
    panels = memory.zeros(padded * (-(-inputs // unit) * unit), dtype=weight.dtype)
    weight = weight.contiguous()
    arguments = (_pointer(weight), outputs, inputs, columns, zmm, int(swiglu))
    if quantization is Quantization.NONE:
        _function(dtype, "pack")(*arguments, _pointer(panels))
    else:
        build.load().orca_int8_pack(*arguments, unit, _pointer(panels))
    if quantization is Quantization.INT8:
        panels.bitwise_xor_(-128)  # as without a sign, 128 more
    if quantization.bits == 4:
        if inputs % 2:
            raise ValueError(f"4-bit weights need an even number of inputs, got {inputs}")
        low, high = panels.to(torch.uint8).view(-1, 2, LANES).unbind(1)
        panels = (low | high << 4).flatten()
    if bias is not None:
        bias = _pack_columns(bias.float(), columns, padded, swiglu)
    return PackedLinear(panels, bias, scales, offsets, outputs, inputs, columns, zmm, epilogue, quantization)


def _round_in_groups(
    weight: torch.Tensor, quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Integers, int8 [outputs, inputs]; their scales and, with 4 bits, offsets, float32 [outputs, groups].

    Four bits are too few to spend one on symmetry: they count from the smallest weight of a group to the largest.
    """
    outputs, inputs = weight.shape
    group = quantization.group
    grouped = torch.nn.functional.pad(weight.float(), (0, -inputs % group)).view(outputs, -1, group)
    offset = None
    if quantization.bits == 4:
        offset = grouped.amin(dim=2, keepdim=True)
        scale = (grouped.amax(dim=2, keepdim=True) - offset).clamp_(min=1e-30) / 15
        rounded = ((grouped - offset) / scale).round_().clamp_(0, 15)
        offset = offset.squeeze(2)
    else:
        scale = grouped.abs().amax(dim=2, keepdim=True).clamp_(min=1e-30) / 127
        rounded = (grouped / scale).round_()
    return rounded.to(torch.int8).flatten(1)[:, :inputs], scale.squeeze(2), offset


def _pack_columns(values: torch.Tensor, columns: int, padded: int, swiglu: bool) -> torch.Tensor:
    """One value per output, [outputs], in the order of the packed columns and zero in the padding: [padded]."""
    packed = torch.zeros(padded, dtype=values.dtype)
    if swiglu:
        gate_and_up = torch.zeros(2, columns // 2, dtype=values.dtype)
        gate_and_up[:, : len(values) // 2] = values.view(2, -1)
        packed[:columns] = gate_and_up.view(2, -1, LANES // 2).transpose(0, 1).flatten()
    else:
        packed[: len(values)] = values
    return packed


@functools.cache
def team(threads: int) -> ctypes.c_void_p:
    """The team of `threads` threads, the caller among them, for all that is compiled in this process; never freed.

    Only one thread at a time may have work done by it. Raises build.CompilerError where the library cannot be had.
    """
    new = build.load().orca_team_new
    new.restype = ctypes.c_void_p
    return ctypes.c_void_p(new(threads))


class Program:
    """Operations in the order in which they are added; `run` computes them for one iteration.

    One team of threads serves all programs of a process. Not safe for use by several threads at once.
    """

    def __init__(self, dimensions: Dimensions, layers: int, dtype: torch.dtype, threads: int) -> None:
        """An empty program. Raises build.CompilerError where the library cannot be had."""
        self._dtype = dtype
        self._vocabulary = dimensions.vocabulary
        self._kept: list[torch.Tensor | None] = []  # what the library holds pointers to
        self._pools: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._names: list[str] = []  # of the operations
        new = _function(dtype, "new")
        new.restype = ctypes.c_void_p
        shape = _Dimensions(**dataclasses.asdict(dimensions))
        self._handle = ctypes.c_void_p(new(ctypes.byref(shape), layers, team(threads)))
        self._free = _function(dtype, "free")
        self._run = _function(dtype, "run")

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._free(handle)

    def _add(self, function: str, *arguments: object, name: str = "", keep: Sequence[torch.Tensor | None] = ()) -> None:
        self._kept += keep
        self._names.append(name or function)
        _function(self._dtype, function)(self._handle, *arguments)

    def embed(self, table: torch.Tensor | PackedLinear, positions: torch.Tensor | None) -> None:
        """Residual = rows of `table` [V, hidden] (or of the packed tied head), plus those of `positions` if given."""
        if isinstance(table, PackedLinear):
            head = ctypes.byref(table.descriptor())
            self._add("embed", _pointer(None), head, _pointer(positions), keep=(*table.tensors, positions))
        else:
            self._add("embed", _pointer(table), _pointer(None), _pointer(positions), keep=(table, positions))

    def norm(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        """HIDDEN = LayerNorm (with `bias`) or RMSNorm of the residual."""
        weight, bias = weight.float().contiguous(), None if bias is None else bias.float().contiguous()
        self._add("norm", _pointer(weight), _pointer(bias), ctypes.c_float(eps), keep=(weight, bias))

    def linear(self, weight: PackedLinear, source: Buffer, target: Buffer) -> None:
        """`target` = product of `source`, by the weight's epilogue. An int8 weight quantizes the source first."""
        if weight.quantization is Quantization.INT8:
            self._add("quantize", int(source))
        self._add(
            "linear",
            ctypes.byref(weight.descriptor()),
            int(source),
            int(target),
            name=f"linear {weight.inputs}x{weight.outputs}",
            keep=weight.tensors,
        )

    def rope_and_write(self, layer: int, cos_sin: torch.Tensor | None) -> None:
        """Rotate queries and keys of QKV by `cos_sin` [max positions, head_dim], and write K/V of `layer`."""
        self._add("rope_and_write", layer, _pointer(cos_sin), keep=(cos_sin,))

    def attention(self, layer: int, scale: float) -> None:
        """CONTEXT = attention of the queries over the K/V of `layer`; scores are multiplied by `scale`."""
        self._add("attention", layer, ctypes.c_float(scale))

    def select(self) -> None:
        """From here on only the wanted tokens."""
        self._add("select")

    def bind_kv(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        """Use these pools, in pages of 16 tokens [page, kv head, head_dim padded to 16, 16], for `layer`.

        Pools of int8 have scales, float32 [page, kv head, 16]. Raises ValueError for dtypes that do not go together.
        """
        pool = (keys, values, key_scales, value_scales)
        expected = [self._dtype] * 2 + [None] * 2 if key_scales is None else [torch.int8] * 2 + [torch.float32] * 2
        if (dtypes := [None if tensor is None else tensor.dtype for tensor in pool]) != expected:
            raise ValueError(f"K/V pools of {dtypes}, not {expected}")
        self._pools[layer] = pool
        _function(self._dtype, "bind_kv")(self._handle, layer, ctypes.byref(_KVLayer(*map(_pointer, pool))))

    def seconds(self) -> dict[str, float]:
        """Seconds spent in all runs so far, by kind of operation, waiting for the slowest thread included."""
        spent = (ctypes.c_double * len(self._names))()
        _function(self._dtype, "seconds")(self._handle, spent)
        table: dict[str, float] = {}
        for name, seconds in zip(self._names, spent, strict=True):
            table[name] = table.get(name, 0.0) + seconds
        return table

    def run(self, token_ids: torch.Tensor, metadata: AttentionMetadata, wanted: torch.Tensor) -> torch.Tensor:
        """Compute one iteration: logits, float32 [R, V], of the flat tokens `wanted` (int64 [R], ascending)."""
        logits = torch.empty(len(wanted), self._vocabulary, dtype=torch.float32)
        batch = _Batch(
            tokens=len(token_ids),
            rows=len(metadata.seq_lens),
            wanted=len(wanted),
            table_width=metadata.block_table.shape[1],
            block_size=metadata.block_size,
            token_ids=_pointer(token_ids),
            positions=_pointer(metadata.positions),
            slots=_pointer(metadata.slot_mapping),
            query_start=_pointer(metadata.query_start_loc),
            seq_lens=_pointer(metadata.seq_lens),
            block_table=_pointer(metadata.block_table),
            wanted_tokens=_pointer(wanted),
            logits=_pointer(logits),
        )
        self._run(self._handle, ctypes.byref(batch))
        return logits
