"""More requests than can run: who goes first, who is told early that it is too late, and what the operator can see."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import new_server
from wire import RawCall, metric, post, wait_until, wait_until_idle

from orca_backend.server.triton_server import TritonServer
from orca_backend.timeline.recording import read
from orca_client import OrcaClient

MAX_QUEUE_SECONDS = 4.0
WAITED = 0.5  # seconds
ONE_TOKEN = {"text_input": "The sky is", "max_tokens": 1, "temperature": 0.0}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One request at a time, by priority; with the slower kernels, so that one that is endless is so on any machine."""
    directory = tmp_path_factory.mktemp("overload")
    settings = {
        "kernels": "torch",
        "scheduler__order": "priority",
        "scheduler__max_bs": 1,
        "scheduler__max_queue_seconds": MAX_QUEUE_SECONDS,
        "kv_cache__prefix_cache": True,
        "limits__max_model_len": 1024,
        "limits__drain_timeout": 2.0,
        "recorder__path": str(directory),
    }
    with new_server(smollm2, directory / "triton.log", **settings) as server:
        yield server


@pytest.fixture
def busy(server: TritonServer) -> Iterator[RawCall]:
    """A request that runs for longer than any test."""
    sampling = json.dumps({"ignore_eos": True, "priority": -1000})
    call = RawCall(
        server, {"text_input": "The sky", "max_tokens": 900, "stream": True, "sampling_parameters": sampling}
    )
    call.first()
    yield call
    call.close(cancel=True)
    wait_until_idle(server)


def with_priority(server: TritonServer, priority: int) -> RawCall:
    return RawCall(server, {**ONE_TOKEN, "sampling_parameters": json.dumps({"priority": priority})})


def test_lower_priorities_run_first(server: TritonServer, busy: RawCall) -> None:
    calls = {priority: with_priority(server, priority) for priority in (5, -1, 0)}
    wait_until(lambda: metric(server, "orca_requests_waiting") == 3)
    busy.close(cancel=True)
    for call in calls.values():
        call.finish()
    assert sorted(calls, key=lambda priority: calls[priority].responses[-1].at) == [-1, 0, 5]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"priority": 2**40}, "priority"),
        ({"tenant": "t" * 300}, "tenant"),
        ({"expected_tokens": -1}, "expected_tokens"),
    ],
)
def test_what_the_scheduler_cannot_be_told(server: TritonServer, settings: dict[str, object], field: str) -> None:
    status, answer = post(server, {**ONE_TOKEN, "parameters": settings})
    assert status == 400
    assert "[INVALID_ARG]" in answer
    assert field in answer


def test_nobody_waits_for_longer_than_the_limit(server: TritonServer, busy: RawCall) -> None:
    expired = metric(server, "orca_expired_total")
    call = RawCall(server, ONE_TOKEN)
    error = call.error()
    assert error.endswith(f"it was not started within {MAX_QUEUE_SECONDS:g} seconds")
    assert call.responses[-1].at - call.sent_at > MAX_QUEUE_SECONDS - 0.1
    assert not busy.responses[-1].final  # while the engine was busy
    wait_until(lambda: metric(server, "orca_expired_total") == expired + 1)


def test_a_deadline_that_cannot_be_met_fails_early(server: TritonServer, busy: RawCall) -> None:
    """900 tokens take longer than 8 s with these kernels; told so, the scheduler does not begin, and does not wait."""
    seconds = 8
    call = RawCall(
        server,
        {**ONE_TOKEN, "max_tokens": 900, "sampling_parameters": '{"expected_tokens": 900}'},
        timeout_us=seconds * 1_000_000,
    )
    assert call.error() == "[UNAVAILABLE] Request timeout expired: its deadline cannot be met"
    assert call.responses[-1].at - call.sent_at < seconds / 2
    assert not busy.responses[-1].final


def test_cached_prefixes_are_counted_and_kept_apart_by_their_salt(server: TritonServer) -> None:
    prompt = "All roads lead to Rome, but this one begins there and goes on for a while. " * 4

    def counted() -> tuple[float, float]:
        return tuple(metric(server, f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))  # type: ignore[return-value]

    with OrcaClient(server.grpc_url) as client:
        length = client.generate(prompt, max_tokens=1, cache_salt="a").num_input_tokens
        wait_until(lambda: counted()[0] >= length)
        for salt, share in (("b", 0.0), ("a", 0.5), ("b", 0.5)):
            queries, hits = counted()
            client.generate(prompt, max_tokens=1, cache_salt=salt)
            wait_until(lambda: counted()[0] == queries + length)  # noqa: B023 (called at once)
            found = counted()[1] - hits
            assert found % 16 == 0
            assert found < length
            assert found >= share * length
            assert share or not found


def test_what_happened_can_be_seen(server: TritonServer, busy: RawCall) -> None:
    """`orca dump` of the engine of a real server, and its timeline."""
    waiting = with_priority(server, 7)
    wait_until(lambda: metric(server, "orca_requests_waiting") == 1)
    (pid,) = server.engine_pids
    orca = [sys.executable, "-m", "orca_backend.cli"]
    dumped = subprocess.run([*orca, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60)
    assert dumped.returncode == 0, dumped.stderr
    file = dumped.stdout.strip()
    flight = read(Path(file))
    assert flight.recording.pid == pid
    assert {request.priority for request in flight.requests.values() if request.ended is None} == {-1000, 7}
    shown = subprocess.run([*orca, "timeline", file], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert f"process {pid}" in shown.stdout
    assert "d decode: one token" in shown.stdout
    busy.close(cancel=True)
    waiting.finish()


def test_time_in_the_queue_is_published(server: TritonServer, busy: RawCall) -> None:
    def queued() -> tuple[float, float]:
        return tuple(metric(server, f"vllm:request_queue_time_seconds_{name}") for name in ("count", "sum"))  # type: ignore[return-value]

    time.sleep(1.2)  # until all that has happened is published
    before = queued()
    call = RawCall(server, ONE_TOKEN)
    wait_until(lambda: metric(server, "orca_requests_waiting") == 1)
    time.sleep(WAITED)
    busy.close(cancel=True)
    call.finish()
    wait_until(lambda: queued()[0] > before[0])
    assert queued()[1] - before[1] >= WAITED
