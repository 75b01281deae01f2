"""Compiled CPU kernels: a decoder's whole iteration in one call, with the plain-torch path as specification."""

from orca_kernels.cpu.program import (
    GROUP,
    LANES,
    PAGE,
    Buffer,
    Dimensions,
    Epilogue,
    PackedLinear,
    Program,
    Quantization,
    obstacle,
    pack_linear,
    team,
)
from orca_kernels.cpu.sampler import SamplingRow, sample_rows

__all__ = [
    "GROUP",
    "LANES",
    "PAGE",
    "Buffer",
    "Dimensions",
    "Epilogue",
    "PackedLinear",
    "Program",
    "Quantization",
    "SamplingRow",
    "obstacle",
    "pack_linear",
    "sample_rows",
    "team",
]
