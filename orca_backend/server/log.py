"""Where a tritonserver's log goes, and the lines of it that tell what went wrong."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from orca_backend.server.installation import ServerError

DIRECTORY = Path("run")
OWN_OUTPUT = Path("-")
LINES = 25


class ServerLog:
    """The log of one server: the file `path` (appended to), "-" for our own output, or None for run/NAME.log.

    run/NAME.log is overwritten; while another running server writes there, it is run/NAME-2.log, and so on.
    """

    def __init__(self, path: str | Path | None, name: str) -> None:
        self.path = Path(path) if path else DIRECTORY / f"{name}.log"
        self._is_ours = path is None
        self._name = name
        self._start = 0

    def open(self) -> BinaryIO:
        """The file to write to. Raises ServerError if it cannot be written."""
        if self.path == OWN_OUTPUT:
            return os.fdopen(os.dup(1), "ab")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open_unused() if self._is_ours else self.path.open("ab")
        except OSError as error:
            raise ServerError(f"cannot write the log {self.path}: {error.strerror}") from error
        self._start = file.tell() if file.seekable() else 0
        return file

    def _open_unused(self) -> BinaryIO:
        for number in itertools.count(1):
            self.path = DIRECTORY / (f"{self._name}.log" if number == 1 else f"{self._name}-{number}.log")
            file = self.path.open("ab")
            try:
                # The server inherits the lock with the file, and holds it for as long as any process of it lives.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            file.truncate(0)
            return file
        raise AssertionError("counting does not end")

    def text(self) -> str:
        """What this server wrote; nothing where that is our own output, or a pipe whose reader has it already."""
        if not self.path.is_file():
            return ""
        with self.path.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")

    def explain(self) -> str:
        """The lines that tell what went wrong, or the last ones, after the log's path."""
        if self.path == OWN_OUTPUT:
            return "its log is above"
        return "\n".join([f"from {self.path}:", *(f"  {line}" for line in relevant_lines(self.text()))])


def relevant_lines(log: str) -> list[str]:
    """At most LINES lines of a tritonserver's log: its errors in full, or where there are none its last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip() and not re.match(r"[|+]", line)]
    found = list(dict.fromkeys(_errors(lines)))
    return (found or lines)[-LINES:]


def _errors(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if re.match(r"[EIWFV]\d{4} ", line):  # level, month, day
            inside = line[0] in "EF"
        elif line.startswith(("Traceback", "error:", "Error:")):
            inside = True
        if inside and "CudaDriverHelper" not in line and "NVML" not in line:  # said on every machine without a GPU
            yield line
