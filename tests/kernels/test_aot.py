"""Every kernel with every shipped constant, compiled for three generations of GPUs, with none of them here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import orca_kernels
from orca_kernels import aot
from orca_kernels.constants import ARCHITECTURES, SHARED_MEMORY


@pytest.fixture(scope="module")
def reports() -> list[aot.Report]:
    """In a process of its own: this one has the interpreter instead of the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "orca_kernels.aot", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [aot.Report(**report) for report in json.loads(result.stdout)]


@pytest.mark.slow
def test_every_kernel_compiles_and_fits(reports: list[aot.Report]) -> None:
    assert {report.architecture for report in reports} == set(ARCHITECTURES)
    too_large = [r for r in reports if r.spilled or r.shared > SHARED_MEMORY[r.architecture]]
    assert not too_large


@pytest.mark.slow
def test_products_use_the_matrix_unit(reports: list[aot.Report]) -> None:
    assert any(report.uses_dot for report in reports)
    assert not [report for report in reports if report.uses_dot != bool(report.matrix)]
    # Prompts on Hopper and on Blackwell are computed by the instructions that only these have.
    kinds = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
    for report in reports:
        if report.name.startswith("attention prefill"):
            assert report.matrix == kinds.get(report.architecture, "mma.sync"), report


@pytest.mark.slow
def test_memory_is_read_sixteen_bytes_at_a_time(reports: list[aot.Report]) -> None:
    assert not [report for report in reports if report.wide_loads < report.expected_wide_loads]


def test_every_module_with_kernels_is_compiled() -> None:
    modules = Path(orca_kernels.__file__).parent / "gpu"
    assert set(aot.MODULES) == {file.stem for file in modules.glob("*.py") if "@triton.jit" in file.read_text()}


def test_the_interpreter_is_refused() -> None:
    command = [sys.executable, "-m", "orca_kernels.aot"]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "TRITON_INTERPRET" in result.stderr
