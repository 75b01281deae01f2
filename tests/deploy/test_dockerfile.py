"""The Dockerfile cannot be built in every place the tests run in; what it names must exist all the same."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from orca_backend.cli import build_parser
from orca_backend.server import Installation, TritonServer

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def instructions() -> list[tuple[str, str]]:
    """(NAME, arguments) of every instruction, continuation lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def arguments_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def shell_commands() -> list[list[str]]:
    """Every command that the image runs: those of RUN, HEALTHCHECK and CMD."""
    commands = [shlex.split(part) for run in arguments_of("RUN") for part in run.split("&&")]
    exec_forms = [*arguments_of("CMD"), *(rest.split("CMD", 1)[1] for rest in arguments_of("HEALTHCHECK"))]
    return commands + [json.loads(form) for form in exec_forms]


def tracked(path: str) -> list[str]:
    command = ["git", "ls-files", "--", path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_hadolint_finds_nothing() -> None:
    result = subprocess.run([BIN / "hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_every_copied_path_is_in_git_and_not_ignored() -> None:
    sources = [word for rest in arguments_of("COPY") for word in shlex.split(rest)[:-1] if not word.startswith("--")]
    assert len(sources) >= 6
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in sources:
        assert tracked(source), f"{source} is not in git"
        assert source in kept, f"{source} is kept out by .dockerignore"
    assert kept == set(sources)


def test_every_orca_command_is_one() -> None:
    commands = [command[1:] for command in shell_commands() if command[0] == "orca"]
    assert {command[0] for command in commands} == {"import-model", "serve"}
    for command in commands:
        build_parser().parse_args(command)  # ends the test with SystemExit if it cannot be parsed


def test_every_python_module_is_one() -> None:
    modules = [c[c.index("-m") + 1] for c in shell_commands() if c[0] == "python3" and "-m" in c]
    assert {"venv", "pip"} <= set(modules)
    assert all(importlib.util.find_spec(module) for module in modules)


def test_every_installed_package_is_pinned() -> None:
    pins = {re.split("[=;]", line)[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if line}
    installs = [c for c in shell_commands() if c[:4] == ["python3", "-m", "pip", "install"]]
    assert installs
    for command in installs:
        assert command[command.index("-c") + 1] == "constraints.txt"
        names = [word for word in command[4:] if not word.startswith("-") and word not in ("constraints.txt", ".")]
        assert set(names) <= pins


def test_other_commands_are_known() -> None:
    names = {command[0] for command in shell_commands()}
    assert names == {"apt-get", "rm", "useradd", "mkdir", "chown", "python3", "orca", "curl"}
    assert any("curl" in command for command in shell_commands() if command[:2] == ["apt-get", "install"])


def test_runs_as_another_user_than_root() -> None:
    [user] = arguments_of("USER")
    assert int(user) > 0
    order = [name for name, _ in instructions()]
    assert order.index("USER") < order.index("CMD")


def test_health_check_asks_the_served_model_on_the_served_port() -> None:
    [check] = [c for c in shell_commands() if c[0] == "curl"]
    [serve] = [build_parser().parse_args(c[1:]) for c in shell_commands() if c[:2] == ["orca", "serve"]]
    [url] = [word for word in check if word.startswith("http")]
    assert url == f"http://127.0.0.1:{serve.http_port}/v2/models/orca/generate"
    assert set(json.loads(check[-1])) == {"text_input", "max_tokens"}
    assert "--fail" in check
    exposed = arguments_of("EXPOSE")[0].split()
    assert exposed == [str(port) for port in (serve.http_port, serve.grpc_port, serve.metrics_port)]
    assert serve.host == "0.0.0.0"


def test_server_knows_every_flag_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = Installation.find()
    help_text = subprocess.run(
        [installation.binary, "--help"], env=installation.environment(), capture_output=True, text=True, timeout=60
    )
    known = set(re.findall(r"^\s+(--[a-z-]+)", help_text.stdout + help_text.stderr, re.MULTILINE))
    started: list[list[str]] = []
    popen = subprocess.Popen

    def recording(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(command)
        return popen(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("orca_backend.server.triton_server.subprocess.Popen", recording)
    with (
        TritonServer(tmp_path, models=[], log=tmp_path / "log") as server,
        urllib.request.urlopen(f"{server.http_url}/v2/health/live", timeout=20) as response,
    ):
        assert response.status == 200
    given = {argument.partition("=")[0] for argument in started[0][1:]}
    assert len(given) > 8
    assert given <= known
