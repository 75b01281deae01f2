"""What of the system works on this machine, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from orca_backend.config import ConfigError, load_config
from orca_backend.server.installation import Installation, ServerError
from orca_backend.server.repository import DEFAULT_MODEL, ENGINE_FILE, models_in
from orca_backend.server.triton_server import TritonServer

DISTRIBUTION = "orca-on-triton"
TESTED_SERVER = "2.51.0"
GIB = 1 << 30

Status = Literal["ok", "warn", "fail"]
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` says what to do where `status` is not ok."""

    status: Status
    subject: str
    text: str
    advice: str = ""


def examine(repository: Path) -> Iterator[Finding]:
    """Look at everything, in the order of dependence. Nothing is changed; nothing is raised."""
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _packages, _server, _cpu, _memory, _limits, _devices]
    for check in checks:
        yield from check()
    yield from _models(repository)


def report(repository: Path, console: Console) -> bool:
    """Print every finding as it is made. Whether none of them is a failure."""
    good = True
    for finding in examine(repository):
        good &= finding.status != "fail"
        line = Text(f"{finding.status:4} ", style=_STYLES[finding.status])
        console.print(line.append(f"{finding.subject:9} {finding.text}", style="default"), soft_wrap=True)
        if finding.status != "ok":
            console.print(Text(f"{'':15}-> {finding.advice}"), soft_wrap=True)
    return good


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Every direct dependency against the range that pyproject.toml gives."""
    found = []
    for line in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", "packages", f"{requirement.name} is not installed", "run `make setup`")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version}")
        else:
            advice = f"pip install -c constraints.txt '{requirement}'"
            yield Finding("fail", "packages", f"{requirement.name} {version} is not {requirement.specifier}", advice)
    yield Finding("ok", "packages", ", ".join(found))
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    advice = "pip uninstall kernels (transformers imports it, and may fail on it)"
    yield Finding("fail", "packages", f"Hugging Face's `kernels` {version} is installed", advice)


def _server() -> Iterator[Finding]:
    """Find the server and start it, without any model."""
    try:
        installation = Installation.find()
    except ServerError as error:
        yield Finding("fail", "server", str(error), "run `make setup`, or use NVIDIA's container")
        return
    ours, stub = f"{sys.version_info.major}.{sys.version_info.minor}", installation.stub_python()
    if stub != ours:
        yield Finding("fail", "stub", f"for Python {stub}, but this is {ours}", f"use a Python {stub} environment")
    else:
        yield Finding("ok", "stub", f"for Python {stub}, at {installation.stub}")
    try:
        with (
            tempfile.TemporaryDirectory() as empty,
            TritonServer(
                empty, models=[], log=Path(empty) / "log", start_timeout=60, console=Console(quiet=True)
            ) as server,
        ):
            version = server.metadata()["version"]
    except (ServerError, OSError) as error:
        yield Finding("fail", "server", f"{installation.binary} does not start: {error}", "see the lines above")
        return
    status: Status = "ok" if version == TESTED_SERVER else "warn"
    yield Finding(status, "server", f"tritonserver {version} at {installation.binary}", f"tested is {TESTED_SERVER}")


def _cpu() -> Iterator[Finding]:
    flags: set[str] = set()
    if (info := Path("/proc/cpuinfo")).is_file():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")
    has = [name for name in known if name in flags]
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} of {os.cpu_count()} cores, {platform.machine()}, {' '.join(has) or 'no vector extension known'}"
    if cores < 2:
        yield Finding("warn", "cpu", text, "server and engine share one core: expect slow answers")
    elif {"avx512_bf16", "amx_bf16", "bf16"} & flags:
        yield Finding("ok", "cpu", text)
    else:
        yield Finding("warn", "cpu", text, "no bfloat16 arithmetic: on the CPU models are computed in float32")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    status: Status = "ok" if memory.available >= 2 * GIB else "warn"
    yield Finding(status, "memory", text, "the demo model and its K/V cache need about 2 GiB")
    if not (shm := Path("/dev/shm")).is_dir():
        yield Finding(
            "fail", "shm", "there is no /dev/shm", "the Python backend needs shared memory: mount a tmpfs there"
        )
        return
    usage = shutil.disk_usage(shm)
    status = "ok" if usage.free >= GIB else "warn" if usage.free >= GIB // 16 else "fail"
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in /dev/shm"
    yield Finding(status, "shm", text, "give the container more, for example --shm-size=1g")


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    status: Status = "ok" if files == resource.RLIM_INFINITY or files >= 4096 else "warn"
    yield Finding(status, "files", f"{files} open files allowed", "raise it for thousands of clients: ulimit -n 65536")


def _devices() -> Iterator[Finding]:
    """The devices torch sees, and the operators on the first of them."""
    try:
        import torch

        from orca_kernels import cpu, rms_norm
    except ImportError as error:
        yield Finding("fail", "kernels", f"cannot be imported: {error}", "run `make setup`")
        return
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("ok", "gpus", ", ".join(gpus) or "none: models run on the CPU")
    device = "cuda" if gpus else "cpu"
    try:
        x_th = torch.ones(2, 8, device=device)
        right = bool(torch.allclose(rms_norm(x_th, torch.ones(8, device=device), 1e-6), x_th, atol=1e-4))
    except RuntimeError as error:
        yield Finding("fail", "kernels", f"do not run on {device}: {error}", "check the driver and the build of torch")
        return
    if not right:
        yield Finding("fail", "kernels", f"orca_kernels computes nonsense on {device}", "reinstall torch")
        return
    yield Finding("ok", "kernels", f"plain torch on {device}")
    if device == "cpu":
        for dtype in (torch.float32, torch.bfloat16):
            obstacle = cpu.obstacle(dtype)
            name = str(dtype).removeprefix("torch.")
            if obstacle is None:
                yield Finding("ok", "kernels", f"compiled for {name} on this CPU")
            else:
                yield Finding("warn", "kernels", f"not compiled for {name}: {obstacle}", "slower, but the same answers")


def _models(repository: Path) -> Iterator[Finding]:
    """Every engine.yaml in the repository, and the checkpoint that it names."""
    names = models_in(repository)
    if not names:
        yield Finding("fail", "model", f"{repository} is no model repository", "name one with --repository")
    for name in names:
        for file in sorted((repository / name).glob(f"*/{ENGINE_FILE}")):
            yield _model(name, file)


def _model(name: str, file: Path) -> Finding:
    subject = "model"
    try:
        from orca_backend.models.import_model import is_complete
        from orca_backend.models.spec import ModelSpec
    except ImportError as error:
        return Finding("fail", subject, f"{name}: cannot be examined: {error}", "run `make setup`")
    try:
        config = load_config(file)
    except ConfigError as error:
        return Finding("fail", subject, str(error), "every key is described in orca_backend/config.py")
    checkpoint = Path(config.model)
    if not is_complete(checkpoint):
        status: Status = "fail" if name == DEFAULT_MODEL else "warn"
        advice = f"run `make model`, or `orca import-model SOURCE {checkpoint}`"
        return Finding(status, subject, f"{name}: {checkpoint} is no complete checkpoint", advice)
    try:
        spec = ModelSpec.read(checkpoint)
    except (OSError, ValueError) as error:  # UnsupportedModelError is a ValueError
        return Finding("fail", subject, f"{name}: {checkpoint}: {error}", "choose a supported model")
    text = f"{name}: {spec.architecture}, {spec.num_layers} layers, {spec.max_positions} positions, {checkpoint}"
    return Finding("ok", subject, text)
