"""The engine processes of this machine, and asking one of them for a recording."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import msgspec
import psutil

from orca_backend.config import RecorderConfig
from orca_backend.timeline.recording import recording_path

_MODULE = "orca_backend.engine"
_LOOK = 0.02  # seconds between two looks for the file


class _Config(msgspec.Struct):
    """What of an engine's configuration is of interest here."""

    recorder: RecorderConfig


def find_engines() -> dict[int, RecorderConfig]:
    """How the recorder of every engine whose command line can be seen is configured, by process id."""
    engines = {}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if _MODULE in command and "--config" in command[:-1]:
            config = command[command.index("--config") + 1]
            with contextlib.suppress(msgspec.DecodeError):  # an engine of another version
                engines[process.pid] = msgspec.json.decode(config, type=_Config).recorder
    return engines


def record(pid: int, config: RecorderConfig, timeout: float) -> Path:
    """Let an engine write what it has recorded, and wait for the file. Raises RuntimeError (none comes) or OSError."""
    if not config.capacity:
        raise RuntimeError(f"the engine with process id {pid} records nothing: its recorder.capacity is 0")
    if not _catches(pid, signal.SIGUSR1):
        raise RuntimeError(f"the engine with process id {pid} is still loading its model")
    path = recording_path(config.path, pid)
    before = _version(path)
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + timeout
    while (version := _version(path)) is None or version == before:
        if not psutil.pid_exists(pid) or time.monotonic() > deadline:
            raise RuntimeError(f"the engine with process id {pid} has not written {path} within {timeout:g} s")
        time.sleep(_LOOK)
    return path


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal, which might end it otherwise."""
    mask = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def _version(path: Path) -> tuple[int, int] | None:
    """Which file stands there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
