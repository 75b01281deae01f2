"""Noticing that another process stops listening: in time, and without looking for its sockets again and again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from orca_backend.serving import drain
from orca_backend.serving.drain import DrainWatcher, listening_sockets, still_open

LISTENER = """
import socket
sockets = {}
while command := input():
    if command in sockets:
        sockets.pop(command).close()
    else:
        sockets[command] = socket.create_server(("127.0.0.1", 0))
    print(flush=True)
"""


class Listener:
    """A process that opens and closes listening sockets by name."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", LISTENER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def toggle(self, name: str) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.process.kill()
    listener.process.communicate()


def test_sockets_are_found_and_seen_to_be_closed_or_replaced(listener: Listener) -> None:
    assert listening_sockets(listener.pid) == frozenset()
    listener.toggle("grpc")
    one = listening_sockets(listener.pid)
    listener.toggle("http")
    both = listening_sockets(listener.pid)
    assert (len(one), len(both)) == (1, 2)
    assert one < both
    assert still_open(both) == both
    listener.toggle("http")
    assert still_open(both) == one
    listener.toggle("metrics")  # it gets the same descriptor
    assert still_open(both) == one
    listener.process.kill()
    listener.process.wait()
    assert still_open(both) == listening_sockets(listener.pid) == frozenset()


@pytest.mark.parametrize("settled", [1, 10**9], ids=["no new ones expected", "still opening"])
def test_a_closed_socket_is_a_drain(listener: Listener, monkeypatch: pytest.MonkeyPatch, settled: int) -> None:
    monkeypatch.setattr(drain, "SETTLED", settled)
    searches: list[frozenset[drain.Socket]] = []
    looks = threading.Semaphore(0)

    def search(pid: int) -> frozenset[drain.Socket]:
        searches.append(listening_sockets(pid))
        looks.release()
        return searches[-1]

    def look(sockets: frozenset[drain.Socket]) -> frozenset[drain.Socket]:
        looks.release()
        return still_open(sockets)

    monkeypatch.setattr(drain, "listening_sockets", search)
    monkeypatch.setattr(drain, "still_open", look)
    drained, said = threading.Event(), []
    listener.toggle("http")
    watcher = DrainWatcher(listener.pid, 0.0, drained.set, said.append, period=0.001)
    for _ in range(20):
        assert looks.acquire(timeout=30)
    assert not said
    assert len(searches) == 2 if settled == 1 else len(searches) >= 20
    listener.toggle("http")
    assert drained.wait(30)
    assert len(said) == 1
    watcher.close()
