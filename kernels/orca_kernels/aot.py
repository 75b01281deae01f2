"""Compile every kernel with every shipped constant for GPUs that need not be there, and report what it takes.

`python -m orca_kernels.aot [--json]`. Compilation runs in two processes. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orca_kernels.constants import ARCHITECTURES, LaunchConstants

# Modules of orca_kernels.gpu that have `launches(architecture)`.
MODULES: tuple[str, ...] = ("activation", "attention", "linear", "norm", "qkv", "sampling")

# Reads of 16 bytes, or of 32 on Blackwell, into registers, and copies of 16 bytes into shared memory.
_WIDE_LOAD = re.compile(r"ld\.global\S*\.(?:v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)|cp\.async\.cg\S*.*?, 0x10,")


@dataclass(frozen=True)
class Launch:
    """One kernel as it is launched.

    `arguments` by name, in any order: types of the runtime arguments ("*bf16", "i32", "fp32"; with ":16" behind it, a
    pointer or number divisible by 16) and values of the constexpr ones; None for a pointer that is not given.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    constants: LaunchConstants
    uses_dot: bool = False  # then there must be matrix instructions
    wide_loads: int = 0  # at least so many reads of global memory must be of 16 bytes per thread


@dataclass(frozen=True)
class Report:
    """What a compiled kernel takes: registers per thread, bytes spilled (local memory, stack), bytes of shared memory.

    `matrix` names its kind of matrix instruction, "" for none; `wide_loads` counts 16-byte reads of global memory,
    of which there should be `expected_wide_loads`.
    """

    name: str
    architecture: int
    registers: int
    spilled: int
    shared: int
    matrix: str
    wide_loads: int
    uses_dot: bool
    expected_wide_loads: int


def compile_launch(launch: Launch, architecture: int) -> Report:
    """Compile `launch` for compute capability `architecture` / 10. Raises what Triton raises if it does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constexprs[(index,)] = value
        else:
            signature[parameter.name], _, divisor = value.partition(":")
            if divisor:
                attributes[(index,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=launch.constants.options)
    ptx = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    matrix = re.search(r"\b(tcgen05\.mma|wgmma\.mma_async|mma\.sync)", ptx)
    return Report(
        name=launch.name,
        architecture=architecture,
        registers=usage["REG"],
        spilled=usage["LOCAL"] + usage["STACK"],
        shared=compiled.metadata.shared,
        matrix=matrix[1] if matrix else "",
        wide_loads=len(_WIDE_LOAD.findall(ptx)),
        uses_dot=launch.uses_dot,
        expected_wide_loads=launch.wide_loads,
    )


def launches(architecture: int) -> Iterator[Launch]:
    """Every kernel of every module with every shipped constant."""
    for module in MODULES:
        yield from importlib.import_module(f"orca_kernels.gpu.{module}").launches(architecture)


def report_all(processes: int = 2) -> list[Report]:
    """Compile everything. Raises what Triton raises for the first that does not compile."""
    work = [
        (architecture, index) for architecture in ARCHITECTURES for index in range(len(list(launches(architecture))))
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        return list(pool.map(_report, work))


def _report(work: tuple[int, int]) -> Report:
    architecture, index = work
    return compile_launch(list(launches(architecture))[index], architecture)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL as cuobjdump, which comes with Triton, reads them from the compiled kernel."""
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", output)}


def main() -> int:
    """Print one line per kernel and architecture; the exit code."""
    parser = argparse.ArgumentParser(prog="orca_kernels.aot", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET must not be set: the interpreter compiles nothing", file=sys.stderr)
        return 2
    reports = report_all()
    if arguments.json:
        print(json.dumps([asdict(report) for report in reports]))
        return 0
    print(f"{'kernel':58} {'sm':>3} {'registers':>9} {'spilled':>7} {'shared':>7} {'16-byte loads':>13}  matrix unit")
    for r in reports:
        print(
            f"{r.name:58} {r.architecture:3} {r.registers:9} {r.spilled:7} {r.shared:7} {r.wide_loads:13}  {r.matrix}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
