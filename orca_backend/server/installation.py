"""Where tritonserver is: NVIDIA's own on PATH (their container), or the one inside the nvidia-pytriton wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

STUB = "triton_python_backend_stub"


class ServerError(RuntimeError):
    """tritonserver cannot be found, started or reached; the message says what to do."""


@dataclass(frozen=True)
class Installation:
    """One tritonserver and the Python backend that belongs to it.

    `backend_files` are to be linked into a directory of their own; without any, `backends` is complete as it is.
    `libraries` are directories for LD_LIBRARY_PATH.
    """

    binary: Path
    stub: Path
    backends: Path
    backend_files: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = ()

    @classmethod
    def find(cls) -> Installation:
        """The tritonserver on PATH, else the one of the wheel. Raises ServerError if there is neither."""
        on_path = shutil.which("tritonserver")
        return cls._native(Path(on_path).resolve()) if on_path else cls._wheel()

    @classmethod
    def _native(cls, binary: Path) -> Installation:
        backends = binary.parent.parent / "backends"
        stub = backends / "python" / STUB
        if not stub.is_file():
            raise ServerError(f"{binary} has no Python backend: {stub} does not exist")
        return cls(binary=binary, stub=stub, backends=backends)

    @classmethod
    def _wheel(cls) -> Installation:
        spec = importlib.util.find_spec("pytriton")  # only located, never imported: its dependencies are not needed
        if spec is None or spec.origin is None:
            raise ServerError("no tritonserver on PATH and no nvidia-pytriton: run `make setup`, or use the container")
        site = Path(spec.origin).parent.parent
        server = site / "pytriton" / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = server / "python_backend_stubs" / version / STUB
        if not stub.is_file():
            have = ", ".join(sorted(p.name for p in stub.parent.parent.glob("*")))
            raise ServerError(f"nvidia-pytriton has no Python backend stub for Python {version}; it has {have}")
        python_backend = server / "backends" / "python"
        return cls(
            binary=server / "bin" / "tritonserver",
            stub=stub,
            backends=server / "backends",
            backend_files=(
                python_backend / "libtriton_python.so",
                python_backend / "triton_python_backend_utils.py",
                stub,
            ),
            libraries=(site / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR"))),
        )

    def assemble(self, directory: Path) -> Path:
        """The backend directory to start the server with; links are made under `directory` where it needs them."""
        if not self.backend_files:
            return self.backends
        python_backend = directory / "python"
        python_backend.mkdir(parents=True)
        for file in self.backend_files:
            (python_backend / file.name).symlink_to(file)
        return directory

    def environment(self) -> dict[str, str]:
        """The environment of the server and its stubs.

        The interpreter inside the stub takes the first `python3` on PATH for its own. With this environment's bin
        directory in front it becomes this (virtual) environment: same packages, editable ones included, and the right
        sys.executable for the processes that the model starts.
        """
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        libraries = [str(path) for path in self.libraries]
        if inherited := environment.get("LD_LIBRARY_PATH"):
            libraries.append(inherited)
        if libraries:
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        environment["PYTHONUNBUFFERED"] = "1"  # what a model prints appears in the log at once
        return environment

    def stub_python(self) -> str | None:
        """The Python version ("3.11") that the stub is linked to, None if it cannot be told."""
        match = re.search(rb"libpython(3\.\d+)", self.stub.read_bytes())
        return match[1].decode() if match else None
