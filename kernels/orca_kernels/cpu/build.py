"""Build the compiled CPU kernels with the machine's own C++ compiler, once per source, compiler and kind of CPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",  # GCC 12 sees ghosts in its own intrinsics
)


class CompilerError(RuntimeError):
    """The library cannot be built or used here; the message says why."""


def cpu_flags() -> frozenset[str]:
    """Instruction set extensions of this CPU as Linux names them; empty where that cannot be read."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def compiler() -> str:
    """Path of the C++ compiler. Raises CompilerError if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise CompilerError("no C++ compiler found (install g++)")


def cache_directory() -> Path:
    """Where built libraries are kept between processes."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "orca-on-triton"


@functools.cache
def load() -> ctypes.CDLL:
    """The library, built if it is not in the cache. Raises CompilerError where it cannot be had."""
    if platform.machine() != "x86_64" or not {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"} <= cpu_flags():
        raise CompilerError("the compiled kernels need an x86-64 CPU with AVX-512 and VNNI")
    sources = sorted(SOURCES.iterdir())
    cxx = compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256()
    for part in (version, *FLAGS, *sorted(cpu_flags()), *(source.read_text() for source in sources)):
        key.update(part.encode() + b"\0")
    library = cache_directory() / key.hexdigest()[:16] / "liborca_cpu.so"
    if not library.exists():
        _compile(cxx, library)
    return ctypes.CDLL(str(library))


def _compile(cxx: str, library: Path) -> None:
    """Build into a temporary file and move it into place, so that processes may build at the same time."""
    library.parent.mkdir(parents=True, exist_ok=True)
    logger.info("building the CPU kernels with %s (once for this machine)", cxx)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        built = Path(directory) / library.name
        command = [cxx, *FLAGS, str(SOURCES / "api.cpp"), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise CompilerError(f"{cxx} cannot build the CPU kernels:\n{result.stderr[-2000:]}")
        built.replace(library)
