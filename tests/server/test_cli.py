from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from orca_backend.server.ports import is_free

ORCA = Path(sys.executable).parent / "orca"
REPOSITORY = Path(__file__).parent / "repository"
FREE_PORTS = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]


def orca(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ORCA, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


@contextmanager
def serving(*arguments: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`orca serve`, once it has said what it says when it is ready."""
    command = [ORCA, "serve", "--repository", REPOSITORY, "--models", "streamer", *arguments]
    process = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "Ctrl-C" in line:
                break
        yield process, said
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_serve_with_default_ports_taken_until_a_signal(tmp_path: Path, stop: signal.Signals) -> None:
    with socket.socket() as other:
        if is_free(8000):
            other.bind(("127.0.0.1", 8000))
            other.listen()
        with serving(cwd=tmp_path) as (process, said):
            assert "Port 8000 is taken; http gets" in said
            children = psutil.Process(process.pid).children(recursive=True)
            assert {"tritonserver", "triton_python_backend_stub"} <= {Path(c.exe()).name for c in children}
            [curl] = re.findall(r"^  (curl .*)$", said, re.MULTILINE)
            url, body = re.search(r"(http\S+) -d '(.*)'", curl).groups()  # type: ignore[union-attr]
            assert json.loads(body)["stream"] is True
            request = urllib.request.Request(url, json.dumps({"text_input": "hello"}).encode())
            with urllib.request.urlopen(request, timeout=60) as response:
                assert b'"text_output":"hello"' in response.read()
            process.send_signal(stop)
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert process.stderr.read().splitlines()[-1] == "Stopped."
            left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
            assert not left
    [log] = (tmp_path / "run").iterdir()
    assert log.name == "serve.log"


def test_serve_ends_with_its_server(tmp_path: Path) -> None:
    with serving(*FREE_PORTS, cwd=tmp_path) as (process, _):
        [server] = [c for c in psutil.Process(process.pid).children() if c.name() == "tritonserver"]
        family = server.children(recursive=True)
        assert len(family) >= 2  # the stub and its child
        server.kill()
        assert process.stderr is not None
        error = process.stderr.read()
        assert process.wait(30) == 1
    assert "tritonserver ended by itself with exit code -9" in error
    assert "Traceback" not in error
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", *FREE_PORTS, "--repository", "."], r"no model repository"),
        (["serve", *FREE_PORTS, "--set", "scheduler.max_bs"], r"write NAME=VALUE"),
        (["serve", *FREE_PORTS, "--set", "scheduler.max_bs=many"], r"scheduler\.max_bs"),
        (["serve", *FREE_PORTS, "--models", "nobody"], r"no model 'nobody'"),
        (["serve", *FREE_PORTS, "--model", "/nowhere"], r"/nowhere: no such directory"),
        (["import-model", "nowhere", "dest"], r"nowhere"),
        (["import-model", "someone/some-model-7B", "dest"], r"some-model-7B \(the names of a hub are not fetched"),
    ],
)
def test_an_error_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = orca(*arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert re.search(message, result.stderr)
    assert result.stderr.count("\n") == 1


def test_import_says_what_it_does(tmp_path: Path, smollm2: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    for file in smollm2.iterdir():
        (dest / file.name).touch()
    source = tmp_path / "model.bin"  # which is refused after all that
    source.touch()
    result = orca("import-model", source, dest, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout.splitlines() == [f"Importing {source} ...", f"Replacing {dest}, an earlier import."]


def test_bare_orca_is_its_help(tmp_path: Path) -> None:
    result = orca(cwd=tmp_path)
    assert result.returncode == 0
    assert "import-model" in result.stdout


def test_version(tmp_path: Path) -> None:
    assert re.fullmatch(r"orca \d+\.\d+\S*\n", orca("--version", cwd=tmp_path).stdout)


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with serving(*FREE_PORTS, "--set", "limits.drain_timeout=30", cwd=tmp_path) as (process, _):
        [server] = [c for c in psutil.Process(process.pid).children() if c.name() == "tritonserver"]
        family = [server, *server.children(recursive=True)]
        server.suspend()  # as one that takes its time
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "Stopping: running requests have up to 30 s (Ctrl-C again to end now)" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert time.monotonic() - started < 25  # the drain timeout is longer
        assert "Stopped" in process.stderr.read()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def test_help_answers_without_heavy_imports(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orca_backend.cli", "serve", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0
    assert "--set" in result.stdout
    assert "argparse" in result.stderr
    assert not re.search(r"\| +(torch|rich|psutil|msgspec)$", result.stderr, re.MULTILINE)


def make_model(repository: Path, name: str, settings: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").touch()
    (repository / name / "1" / "engine.yaml").write_text(settings)


def test_doctor_finds_what_is_wrong(tmp_path: Path) -> None:
    make_model(tmp_path / "model_repository", "orca", "model: ../missing")
    make_model(tmp_path / "model_repository", "unfair", "model: ../missing\nscheduler: {policy: fair}")
    result = orca("doctor", cwd=tmp_path)
    assert result.returncode == 1
    assert re.search(r"^ok +server +tritonserver 2\.\d+\.\d+", result.stdout, re.MULTILINE)
    assert re.search(
        r"^fail +model +orca: .* no complete checkpoint\n +-> run `make model`", result.stdout, re.MULTILINE
    )
    assert re.search(r"^fail +model .*policy", result.stdout, re.MULTILINE)


def test_doctor_is_content_with_a_good_model(tmp_path: Path, smollm2: Path) -> None:
    make_model(tmp_path / "model_repository", "orca", f"model: {smollm2}")
    result = orca("doctor", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "LlamaForCausalLM" in result.stdout
