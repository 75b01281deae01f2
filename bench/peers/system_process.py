"""A system under test as the driver sees it: a process to load, to run tasks on, and to freeze in between."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bench.peers.adapters.protocol import Request
from bench.peers.environments import ROOT, RUN
from bench.peers.metrics import Outcome
from bench.peers.systems import ADAPTERS, SystemUnderTest

_PATIENCE = 30.0  # seconds that a system has to end by itself


class SystemFailed(Exception):
    """The system failed; the message is its own."""


class SystemProcess:
    """Context manager: one adapter and its descendants, which are frozen whenever they have nothing to do.

    Frozen, because systems that wait may still spin or poll, and would do so in the others' measurements.
    """

    def __init__(self, name: str, system: SystemUnderTest, threads: int) -> None:
        """Start the process. Its log is run/peers/NAME.log."""
        self.name = name
        self.log = RUN / f"{name}.log"
        RUN.mkdir(parents=True, exist_ok=True)
        variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [system.python, str(ADAPTERS / system.adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **variables, **system.variables},
                start_new_session=True,
            )

    def load(self, model: Path, options: dict[str, Any], timeout: float = 900.0) -> dict[str, Any]:
        """Load the model: "info" about the system and "seconds". Raises SystemFailed."""
        return self._ask({"op": "load", "model": str(model), "options": options}, timeout)

    def run(self, requests: list[Request], timeout: float = 900.0) -> Outcome:
        """Serve the requests. Raises SystemFailed."""
        reply = self._ask({"op": "run", "requests": [asdict(request) for request in requests]}, timeout)
        return Outcome(**reply)

    def peak_memory(self) -> int:
        """Bytes: the sum of the peak resident sizes of all its processes (shared pages count in each)."""
        total = 0
        for process in self._family():
            status = Path(f"/proc/{process.pid}/status").read_text()
            sizes = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
            total += next(sizes, 0)  # a process that has just ended has none
        return total

    def _ask(self, command: dict[str, Any], timeout: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        try:
            self._signal(signal.SIGCONT)
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
            line = self._read_line(stdout.fileno(), timeout)
        except BrokenPipeError:
            line = b""
        if not line:
            raise SystemFailed(f"{self.name} died or hung (log: {self.log})")
        reply = json.loads(line)
        if "error" in reply:
            with self.log.open("a") as log:
                log.write(reply["trace"])
            raise SystemFailed(f"{reply['error']} (log: {self.log})")
        self._signal(signal.SIGSTOP)
        return reply

    def _read_line(self, descriptor: int, timeout: float) -> bytes:
        """One line of at most `timeout` seconds; empty if none came."""
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(descriptor, 1 << 20) if ready else b""
            if not piece:
                return b""
            line += piece
        return line

    def _signal(self, which: signal.Signals) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(which)

    def _family(self) -> list[psutil.Process]:
        """The adapter first. Descendants may lead process groups of their own."""
        try:
            adapter = psutil.Process(self._process.pid)
            return [adapter, *adapter.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def __enter__(self) -> SystemProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has died with a command unread
            self._process.stdin.close()
        family = self._family()
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        for process in family:  # what it has left behind
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
