"""The engine loop while an iteration runs for as long as the test wants."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from orca_backend.channel import Channel, Heartbeat, IterationReport, Shutdown, Submit
from orca_backend.request import Request


def next_report(channel: Channel) -> IterationReport:
    while isinstance(message := channel.receive(), Heartbeat):
        pass
    assert isinstance(message, IterationReport)
    return message


def test_who_waits_too_long_is_told_while_an_iteration_runs() -> None:
    channel, fd = Channel.pair()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("blocked_engine.py")), str(fd)],
        pass_fds=[fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(fd)
    try:
        assert process.stdin
        assert process.stdout
        channel.send(Submit(Request(request_id=1, prompt_ids=[1], max_new_tokens=1)))
        assert process.stdout.readline() == "running\n"
        began = time.monotonic()
        channel.send(Submit(Request(request_id=2, prompt_ids=[1], max_new_tokens=1)))
        (event,) = next_report(channel).events
        assert time.monotonic() - began >= 0.2
        assert (event.request_id, event.code) == (2, "UNAVAILABLE")
        assert event.message == "Request timeout expired: it was not started within 0.2 seconds"
        process.stdin.write("\n")
        process.stdin.flush()
        (event,) = next_report(channel).events  # the one that runs was started in time
        assert (event.request_id, event.finish_reason) == (1, "length")
        channel.send(Shutdown())
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
