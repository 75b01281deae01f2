from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import psutil
import pytest

import orca_backend
from orca_backend.cli import PORTS
from orca_backend.config import ConfigError
from orca_backend.server import ServerError, TritonServer
from orca_backend.server.log import LINES, ServerLog, relevant_lines
from orca_backend.server.ports import free_ports
from orca_backend.server.triton_server import USUAL_PORTS, _mark

REPOSITORY = Path(__file__).parent / "repository"


def living(pids: list[int]) -> list[int]:
    """Those that run. An orphan that init has not reaped yet does not."""
    return [p.pid for p in psutil.process_iter() if p.pid in pids and p.status() != psutil.STATUS_ZOMBIE]


def stream(server: TritonServer, text: str) -> list[str]:
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/streamer/generate_stream", json.dumps({"text_input": text}).encode()
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        lines = [line.decode() for line in response]
    return [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line.startswith("data: ")]


def test_streams_through_a_real_server(streamer: TritonServer) -> None:
    assert stream(streamer, "one two three") == ["one", "two", "three"]
    assert streamer.metadata()["name"] == "triton"
    with urllib.request.urlopen(streamer.metrics_url, timeout=20) as response:
        assert b"nv_inference_request_success" in response.read()


def test_stub_lives_in_this_environment(streamer: TritonServer) -> None:
    about = json.loads(stream(streamer, "about")[0])
    assert Path(about["executable"]).parent == Path(sys.executable).parent
    assert about["modules"][0] == orca_backend.__file__
    # The folder kernels/ on the path would shadow, or be taken for, Hugging Face's package of that name.
    root = Path(orca_backend.__file__).parent.parent
    assert not {str(root), str(root / "kernels")} & set(about["path"])


def test_settings_change_only_the_runtime_copy(streamer: TritonServer) -> None:
    original = (REPOSITORY / "streamer" / "1" / "engine.yaml").read_text()
    settings = msgspec.yaml.decode(json.loads(stream(streamer, "about")[0])["settings"])
    assert settings["scheduler"]["max_bs"] == 3
    assert settings["limits"]["drain_timeout"] == 1
    assert settings["model"] == str(REPOSITORY / "streamer" / "weights")
    assert "max_bs" not in original


def test_processes_are_visible(streamer: TritonServer) -> None:
    [stub], [engine] = streamer.stub_pids, streamer.engine_pids
    assert psutil.Process(stub).ppid() == streamer.pid
    assert engine == json.loads(stream(streamer, "about")[0])["child"]


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    with TritonServer(REPOSITORY, models=["streamer"], log=tmp_path / "log") as server:
        pids = [server.pid, *server.stub_pids, *server.engine_pids]
        directory = server._directory
        assert len(pids) == 3
        assert directory is not None
        assert directory.is_dir()
    assert server.stop() == 0  # once more is harmless, and the exit was a clean one
    assert not living(pids)
    assert not directory.exists()


def test_failed_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    started = time.monotonic()
    server = TritonServer(REPOSITORY, models=["broken"], log=tmp_path / "log")
    with pytest.raises(ServerError, match="the weights of this model are missing"):
        server.__enter__()
    assert time.monotonic() - started < 120  # long before the time limit
    assert not server.is_alive()


@pytest.mark.parametrize("limit", [0.01, 0.5])  # before the stub starts its child, and about then
def test_start_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = TritonServer(REPOSITORY, models=["streamer"], log=tmp_path / "log", start_timeout=limit)
    monkeypatch.setattr(server, "_is_ready", lambda: False)
    with pytest.raises(ServerError, match=f"not ready after {limit:g} s"):
        server.__enter__()
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]
    time.sleep(0.5)  # a stub that is still there would have started its child by now
    left = [process for process in psutil.process_iter() if str(tmp_path) in (_mark(process) or "")]
    assert not left


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is taken"):
            TritonServer(REPOSITORY, models=["streamer"], grpc_port=port, log=tmp_path / "log").__enter__()


def test_unwritable_log_is_named() -> None:
    with pytest.raises(ServerError, match="cannot write the log /proc/nowhere/log"):
        TritonServer(REPOSITORY, models=["streamer"], log="/proc/nowhere/log").__enter__()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scheduler.max_bs": 0}, r"^--set scheduler\.max_bs=0: Expected `int` >= 1$"),
        (
            {"scheduler.speed": 1},
            r"^--set scheduler\.speed=1: unknown setting; scheduler has policy, order, .*max_bs, n_workers, .*$",
        ),
        ({"speed": 1}, r"^--set speed=1: unknown setting; the top has model, dtype, .*sampling_defaults$"),
        (
            {"scheduler.policy": "fair"},
            r"^--set scheduler\.policy=fair: not 'fair'; allowed are orca, orca_max, .*static_fair, static_ft$",
        ),
        ({"kv_cache.memory": "much"}, r"^--set kv_cache\.memory=much: not a size in bytes: 'much'"),
        ({"sampling_defaults": {"top_p": 2}}, r'^--set sampling_defaults={"top_p":2}: top_p must be'),
        ({"model.x": 1}, r"^--set model\.x=1: model has no settings of its own$"),
    ],
)
def test_bad_setting_is_refused_before_start(tmp_path: Path, overrides: dict[str, object], message: str) -> None:
    server = TritonServer(REPOSITORY, models=["streamer"], overrides=overrides, log=tmp_path / "log")
    with pytest.raises(ConfigError, match=message):
        server.__enter__()
    assert not server.log_path.exists()


def test_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model 'gpt5'; there is broken, streamer"):
        TritonServer(REPOSITORY, models=["gpt5"])


def test_relevant_lines_are_the_errors_with_what_belongs_to_them() -> None:
    log = """I1129 16:20:47.521009 9320 server.cc:1] "starting"
E1129 16:20:47.521158 9320 server.cc:241] "CudaDriverHelper has not been initialized."
E1129 16:20:48.000000 9320 model.cc:2] "failed to load 'orca' version 1: Internal: ConfigError: no such file

At:
  model.py(3): initialize
"
I1129 16:20:49.000000 9320 server.cc:3] "unloading"
+-----+
| a   |
"""
    lines = relevant_lines(log)
    assert len(lines) == 4
    assert "no such file" in lines[0]
    assert "initialize" in lines[2]
    assert relevant_lines("\n".join(f"I1129 1 line {i}" for i in range(100))) == [
        f"I1129 1 line {i}" for i in range(100 - LINES, 100)
    ]


SLOW_MODEL = """
import time
class TritonPythonModel:
    def initialize(self, args):
        time.sleep(1.5)
    def execute(self, requests):
        return None
"""


@pytest.fixture
def slow_repository(tmp_path: Path) -> Path:
    """A model that takes long enough to load for others to take ports meanwhile."""
    model = tmp_path / "repository" / "slow"
    (model / "1").mkdir(parents=True)
    config = (REPOSITORY / "broken" / "config.pbtxt").read_text()
    (model / "config.pbtxt").write_text(config.replace("broken", "slow"))
    (model / "1" / "model.py").write_text(SLOW_MODEL)
    return model.parent


class Ready(BaseHTTPRequestHandler):
    """Another server, which is ready for everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def taken_while_loading(server: TritonServer, services: list[str]) -> Iterator[None]:
    """Somebody who takes the ports that `server` was to have, as soon as its process runs."""
    others = []

    def take() -> None:
        while not server.is_alive():
            time.sleep(0.01)
        for service in services:
            others.append(ThreadingHTTPServer(("127.0.0.1", server._ports[service]), Ready))
            threading.Thread(target=others[-1].serve_forever, daemon=True).start()

    taker = threading.Thread(target=take)
    taker.start()
    try:
        yield
    finally:
        taker.join()
        for other in others:
            other.shutdown()
            other.server_close()


@pytest.mark.parametrize("services", [["http", "metrics"], ["grpc"]])
def test_a_chosen_port_that_is_taken_meanwhile_is_chosen_anew(
    tmp_path: Path, slow_repository: Path, services: list[str]
) -> None:
    server = TritonServer(slow_repository, log=tmp_path / "log")
    first = dict(server._ports)
    with taken_while_loading(server, services), server:
        assert server.metadata()["name"] == "triton"  # the other one answers with nothing
        assert not set(first.values()) & set(server._ports.values())


def test_a_port_that_was_asked_for_and_is_taken_meanwhile_is_an_error(tmp_path: Path, slow_repository: Path) -> None:
    [port] = free_ports(1)
    server = TritonServer(slow_repository, http_port=port, log=tmp_path / "log")
    with (
        taken_while_loading(server, ["http", "metrics"]),
        pytest.raises(ServerError, match=rf"^port {port}( and \d+)? was taken while the models loaded$"),
        server,
    ):
        pass
    assert not server.is_alive()


def test_usual_ports_are_those_of_the_command_line() -> None:
    assert USUAL_PORTS == PORTS


def test_own_logs_are_overwritten_unless_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logs = [ServerLog(None, "serve") for _ in range(3)]
    with logs[0].open() as first, logs[1].open() as second:
        first.write(b"one")
        second.write(b"two")
        assert [log.path.name for log in logs[:2]] == ["serve.log", "serve-2.log"]
    with logs[2].open():
        assert logs[2].path.name == "serve.log"
        assert logs[2].text() == ""
    assert logs[1].text() == "two"


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    server = TritonServer(REPOSITORY, models=["streamer"], overrides={"model": str(missing)}, log=tmp_path / "log")
    with pytest.raises(ConfigError, match=f"{missing}: no such directory"):
        server.__enter__()
    missing.mkdir()
    (missing / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{missing}: no tokenizer.json, model.safetensors in it"):
        server.__enter__()
    assert not (tmp_path / "log").exists()


def test_token_limits_are_those_of_the_engine(tmp_path: Path, smollm2: Path) -> None:
    repository = Path(orca_backend.__file__).parents[1] / "model_repository"
    overrides = {"model": str(smollm2), "kv_cache.n_slots": 512, "kernels": "torch"}
    with TritonServer(repository, models=["orca"], overrides=overrides, log=tmp_path / "log") as server:
        assert server.token_limits() == {"orca": (512, 512)}
