"""Supervision of the engine process, with small real processes that speak the real channel."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from orca_backend.channel import EngineInfo, Heartbeat, IterationReport
from orca_backend.config import EngineConfig, LimitsConfig
from orca_backend.request import Request
from orca_backend.serving.engine_client import EngineClient, EngineStartError, EngineUnavailable, find_python

SCRIPT = Path(__file__).with_name("scripted_engine.py")


class Diary:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[IterationReport | Heartbeat] = queue.SimpleQueue()
        self.deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.restarts: queue.SimpleQueue[EngineInfo] = queue.SimpleQueue()

    def on_report(self, report: IterationReport | Heartbeat) -> None:
        self.reports.put(report)

    def on_engine_died(self, message: str) -> None:
        self.deaths.put(message)

    def on_engine_restarted(self, info: EngineInfo) -> None:
        self.restarts.put(info)


Make = Callable[..., tuple[EngineClient, Diary]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    clients = []

    def made(mode: str, start_timeout: float = 20.0, engine_silence: float = 30.0) -> tuple[EngineClient, Diary]:
        limits = LimitsConfig(start_timeout=start_timeout, engine_silence=engine_silence)
        config = EngineConfig(model=str(tmp_path), limits=limits, threads=1)
        diary = Diary()
        client = EngineClient(config, diary, print, command=[sys.executable, str(SCRIPT), mode], first_backoff=0.05)
        clients.append(client)
        return client, diary

    yield made
    for client in clients:
        client.stop()


def request(request_id: int, ids: list[int]) -> Request:
    return Request(request_id=request_id, prompt_ids=ids, max_new_tokens=10)


def test_requests_go_and_events_come(make: Make) -> None:
    client, diary = make("echo")
    info = client.start()
    assert info.pid == client.pid
    assert info.architecture == "PASSIVE"  # OMP_WAIT_POLICY in the child's environment
    client.submit(request(7, [5, 6]))
    tokens: list[int] = []
    while len(tokens) < 2:
        report = diary.reports.get(timeout=30)
        if isinstance(report, IterationReport):
            tokens += [token for event in report.events for token in event.token_ids]
    assert tokens == [5, 6]


def test_stop_ends_the_process_and_is_no_death(make: Make) -> None:
    client, diary = make("hold")
    client.start()
    process = psutil.Process(client.pid)
    began = time.monotonic()
    client.stop()
    assert time.monotonic() - began < 5
    assert not process.is_running()
    assert diary.deaths.empty()
    with pytest.raises(EngineUnavailable):
        client.submit(request(1, [1]))


@pytest.mark.parametrize(
    ("mode", "reason"), [("refuse", "no such model"), ("exit", "exit code 3"), ("mute", r"not ready after 0\.5 s")]
)
def test_an_engine_that_does_not_start_says_why(make: Make, mode: str, reason: str) -> None:
    client, _ = make(mode, start_timeout=0.5 if mode == "mute" else 20.0)
    with pytest.raises(EngineStartError, match=reason):
        client.start()
    assert client.pid is not None
    assert not psutil.pid_exists(client.pid)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    client = EngineClient(EngineConfig(model="m"), Diary(), print, command=[str(tmp_path / "nothing")])
    with pytest.raises(EngineStartError, match="nothing"):
        client.start()


def test_a_death_is_told_once_and_the_engine_comes_back(make: Make) -> None:
    client, diary = make("hold")
    first = client.start()
    client.submit(request(1, [1]))
    os.kill(first.pid, 9)
    assert "SIGKILL" in diary.deaths.get(timeout=30)
    second = diary.restarts.get(timeout=60)
    assert second.pid not in (first.pid, 0)
    client.submit(request(2, [1]))
    assert client.restarts == 1
    assert diary.deaths.empty()


def test_between_death_and_restart_requests_are_refused_at_once(make: Make) -> None:
    client, diary = make("once")  # only the first process starts; the later ones are retried with growing pauses
    first = client.start()
    os.kill(first.pid, 9)
    diary.deaths.get(timeout=30)
    for _ in range(5):
        began = time.monotonic()
        with pytest.raises(EngineUnavailable, match="died"):
            client.submit(request(1, [1]))
        assert time.monotonic() - began < 5  # an engine that does not start is waited for longer
        time.sleep(0.1)
    assert diary.restarts.empty()


def test_an_engine_that_dies_at_every_request(make: Make) -> None:
    client, diary = make("crash")
    client.start()
    for round_ in range(1, 4):
        client.submit(request(round_, [1]))
        assert "SIGKILL" in diary.deaths.get(timeout=30)
        diary.restarts.get(timeout=60)
        assert client.restarts == round_


def test_nobody_waits_for_an_engine_that_hangs(make: Make) -> None:
    """A send that filled the socket's buffer once held the lock that every cancel needs."""
    client, diary = make("hold")
    pid = client.start().pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    for request_id in range(24):
        client.submit(request(request_id, list(range(1000, 27_000))))
    for request_id in range(24):
        client.cancel(request_id)
    assert time.monotonic() - began < 20  # not until the engine's silence is too long
    os.kill(pid, signal.SIGCONT)
    running = [0]
    while len(running) < 3 or running[-2:] != [1, 0]:
        report = diary.reports.get(timeout=30)
        running.append(report.occupancy.running)
    assert max(running) == 24  # every Submit came before its Cancel
    assert diary.deaths.empty()


def test_an_engine_that_says_nothing_is_replaced(make: Make) -> None:
    client, diary = make("hold", engine_silence=3.0)
    first = client.start()
    with pytest.raises(queue.Empty):
        diary.deaths.get(timeout=4)  # idle, but its heart beats
    os.kill(first.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert "SIGKILL" in diary.deaths.get(timeout=30)
    assert time.monotonic() - began > 0.5  # half the silence, and a second in which it may write its recording
    assert diary.restarts.get(timeout=60).pid != first.pid
    client.submit(request(1, [1]))
    while diary.reports.get(timeout=30).occupancy.running != 1:
        pass


def test_an_engine_that_hangs_is_asked_for_its_recording_before_it_is_killed(make: Make, tmp_path: Path) -> None:
    client, diary = make("silent", engine_silence=0.5)
    client.start()
    assert "SIGKILL" in diary.deaths.get(timeout=20)
    assert (tmp_path / "recorded").exists()


def test_the_engine_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    """The channel closes with its owner, whatever kills that: the engine must not stay behind."""
    code = (
        "import sys, time; from orca_backend.serving.engine_client import EngineClient;"
        "from orca_backend.config import EngineConfig;"
        f"command = [sys.executable, {str(SCRIPT)!r}, 'hold'];"
        "client = EngineClient(EngineConfig(model='m'), None, print, command=command);"
        "print(client.start().pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    engine = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.communicate()
    psutil.wait_procs([engine], timeout=30)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_python_of_this_version() -> None:
    version = subprocess.check_output([find_python(), "-c", "import sys; print(sys.version_info[:2])"], text=True)
    assert version.strip() == str(sys.version_info[:2])


def test_configuration_survives_the_way() -> None:
    config = EngineConfig(model="m", limits=LimitsConfig(max_queue_size=7))
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
