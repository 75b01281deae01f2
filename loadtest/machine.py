"""Where a number was measured: the machine and the commit, without names of hosts or people."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def machine() -> dict[str, Any]:
    """The processor, the memory and the GPUs."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    found = {
        "processor": facts.get("model name", platform.machine()),
        "cores": psutil.cpu_count(),
        "memory GB": round(psutil.virtual_memory().total / 1e9, 1),
        "features": [flag for flag in _FEATURES if flag in facts.get("flags", "").split()],
    }
    if gpus := _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"):
        found["GPUs"] = gpus.splitlines()
    return found


def commit() -> str:
    """The commit of this source tree, and whether files differ from it; "unknown" without git."""
    found = _output("git", "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{found} and local changes" if found and changed else found or "unknown"


def command() -> str:
    """What was typed to run this process, with paths relative to the source tree."""
    program = Path(sys.argv[0]).name
    return shlex.join([program, *sys.argv[1:]]).replace(f"{ROOT}/", "")


def _output(*arguments: str) -> str:
    """What a program prints; "" where it is not there or fails."""
    try:
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
