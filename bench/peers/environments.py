"""A virtual environment per system under run/peers/, made from a complete list of pins; never the product's own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "run" / "peers"


class InstallError(Exception):
    """An environment cannot be made; the message ends with what was said last, and names the log."""


@dataclass(frozen=True)
class Environment:
    """`name`.txt beside this file has the pins. `variables` are set while packages are built."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return RUN / self.name / "bin" / "python"

    @property
    def pins(self) -> Path:
        """Its requirements file."""
        return Path(__file__).with_name(f"{self.name}.txt")

    def install(self) -> None:
        """Make it, unless it was made from these pins before. Raises InstallError."""
        stamp = RUN / self.name / ".installed"
        key = hashlib.sha256(self.pins.read_bytes() + repr((sys.version_info[:2], self.variables)).encode()).hexdigest()
        if stamp.exists() and stamp.read_text() == key:
            return
        run([sys.executable, "-m", "venv", "--clear", str(RUN / self.name)], f"{self.name}-install")
        # The lists are complete. What is missing from them on purpose (see there) must not come back by resolving.
        command = [str(self.python), "-m", "pip", "install", "--no-input", "--no-deps", "-r", str(self.pins)]
        run(command, f"{self.name}-install", self.variables)
        stamp.write_text(key)


def run(command: list[str], log_name: str, variables: dict[str, str] | None = None) -> None:
    """Run a command, its output in run/peers/LOG_NAME.log. Raises InstallError if it fails."""
    RUN.mkdir(parents=True, exist_ok=True)
    log = RUN / f"{log_name}.log"
    with log.open("w") as output:
        environment = {**os.environ, **(variables or {})}
        status = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    if status:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise InstallError(f"{Path(command[0]).name} failed with {status}: {''.join(last)} (all of it: {log})")
