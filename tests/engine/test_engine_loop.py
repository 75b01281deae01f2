"""The engine loop while an iteration runs for as long as the test wants."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orca_backend.channel import Channel, Heartbeat, IterationReport, Shutdown, Submit
from orca_backend.request import Request


def next_report(channel: Channel) -> IterationReport:
    while isinstance(message := channel.receive(), Heartbeat):
        pass
    assert isinstance(message, IterationReport)
    return message


@contextlib.contextmanager
def blocked_engine(iteration_timeout: float = 600.0) -> Iterator[tuple[Channel, subprocess.Popen[str]]]:
    """See blocked_engine.py."""
    channel, fd = Channel.pair()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("blocked_engine.py")), str(fd), str(iteration_timeout)],
        pass_fds=[fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(fd)
    try:
        yield channel, process
    finally:
        process.kill()
        process.communicate()


def go_on(process: subprocess.Popen[str], how: str = "") -> None:
    """Let the iteration that runs, or the next, be over."""
    assert process.stdin
    process.stdin.write(f"{how}\n")
    process.stdin.flush()


def until_it_runs(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert process.stdout.readline() == "running\n"


def test_who_waits_too_long_is_told_while_an_iteration_runs() -> None:
    with blocked_engine() as (channel, process):
        channel.send(Submit(Request(request_id=1, prompt_ids=[1], max_new_tokens=1)))
        until_it_runs(process)
        began = time.monotonic()
        channel.send(Submit(Request(request_id=2, prompt_ids=[1], max_new_tokens=1)))
        (event,) = next_report(channel).events
        assert time.monotonic() - began >= 0.2
        assert (event.request_id, event.code) == (2, "UNAVAILABLE")
        assert event.message == "Request timeout expired: it was not started within 0.2 seconds"
        go_on(process)
        (event,) = next_report(channel).events  # the one that runs was started in time
        assert (event.request_id, event.finish_reason) == (1, "length")
        channel.send(Shutdown())
        assert process.wait(60) == 0


def test_an_engine_whose_iteration_does_not_end_falls_silent() -> None:
    """Its loop is well, only its worker hangs: heartbeats would say that all is well for ever."""
    with blocked_engine(iteration_timeout=1.0) as (channel, process):
        for request_id in (1, 2):
            channel.send(Submit(Request(request_id=request_id, prompt_ids=[1], max_new_tokens=1)))
            until_it_runs(process)
            while channel.wait(4):
                assert not isinstance(channel.receive(), IterationReport)
            go_on(process)
            (event,) = next_report(channel).events
            assert (event.request_id, event.finish_reason) == (request_id, "length")
        assert isinstance(channel.receive(), Heartbeat)  # idle, it is well again


def test_an_engine_whose_iterations_all_fail_ends() -> None:
    """As on a GPU after an illegal access, where nothing works before another process begins."""
    with blocked_engine() as (channel, process):
        for request_id, how in enumerate(("fail", "fail", "", "fail", "fail", "fail")):
            channel.send(Submit(Request(request_id=request_id, prompt_ids=[1], max_new_tokens=1)))
            go_on(process, how)
            (event,) = next_report(channel).events
            assert event.finish_reason == ("error" if how else "length")
        assert process.wait(60) == 1
