"""The engine dies under load, then the whole server is told to end under load: everybody gets one clear answer."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import new_server
from wire import RawCall, metric, wait_until, wait_until_idle

from orca_backend.server.triton_server import TritonServer
from orca_client import Finished, OrcaClient, OrcaError, Unavailable

DRAIN = 4.0
PROMPT = "The sky is"
ENDLESS = '{"max_tokens": 400, "ignore_eos": true}'  # the K/V slots hold a dozen of them


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Used by the tests of this file in their order: the last one ends it."""
    settings = {"scheduler__max_bs": 8, "limits__drain_timeout": DRAIN}
    with new_server(smollm2, tmp_path_factory.mktemp("lifecycle") / "triton.log", **settings) as server:
        yield server


def load(server: TritonServer) -> list[RawCall]:
    """Requests that decode, one that is in prefill, and others that wait; none of them ends by itself."""
    inputs = {"text_input": PROMPT, "sampling_parameters": ENDLESS}
    decoding = [RawCall(server, {**inputs, "stream": index > 0}) for index in range(6)]
    for call in decoding[1:]:
        call.first()
    prefill = RawCall(server, {**inputs, "text_input": PROMPT * 300, "stream": True})
    waiting = [RawCall(server, {**inputs, "stream": True}) for _ in range(8)]
    time.sleep(0.2)
    return [*decoding, prefill, *waiting]


def test_killed_engine(server: TritonServer) -> None:
    stubs, pid = server.stub_pids, server.pid
    (engine,) = server.engine_pids
    assert metric(server, "orca_engine_restarts_total") == 0
    calls = load(server)
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    with OrcaClient(server.grpc_url, retries=0) as client:
        calls[0].finish()  # it is known
        with pytest.raises(Unavailable, match="the engine process died and is being restarted"):
            client.generate(PROMPT, max_tokens=1)
    for call in calls:
        assert call.error().startswith("[UNAVAILABLE] the engine process died (SIGKILL)")
        assert call.responses[-1].at - killed < 10  # they do not wait until the engine is back, or for their deadline
    with OrcaClient(server.grpc_url, retries=0) as client:
        back = None
        while back is None and time.monotonic() < killed + 20:
            with contextlib.suppress(Unavailable):
                back = client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
            time.sleep(0.05)
    assert back is not None
    assert back.num_output_tokens == 4
    assert (server.stub_pids, server.pid) == (stubs, pid)
    assert server.engine_pids != [engine]
    wait_until(lambda: metric(server, "orca_engine_restarts_total") == 1)
    assert metric(server, "orca_failures_total", reason="UNAVAILABLE") >= len(calls)
    wait_until_idle(server)


def test_retries_of_the_sdk_bridge_a_restart(server: TritonServer) -> None:
    with OrcaClient(server.grpc_url, retries=20) as client:
        os.kill(server.engine_pids[0], signal.SIGKILL)
        assert client.generate(PROMPT, max_tokens=2, ignore_eos=True, timeout=30).num_output_tokens == 2
    wait_until(lambda: metric(server, "orca_engine_restarts_total") == 2)


def test_sigterm_under_load(server: TritonServer) -> None:
    """What ends within the drain timeout ends well, the rest with one error; new requests are refused; code 0."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(family) >= 3  # server, stub, engine
    ends: dict[str, object] = {}
    plans = {"endless": 2000, "long": 1000, "short": 12}
    begun = {name: threading.Event() for name in plans}

    def read(name: str, client: OrcaClient, max_tokens: int) -> None:
        try:
            for event in client.stream(PROMPT, max_tokens=max_tokens, ignore_eos=True):
                begun[name].set()
                ends[name] = event
        except OrcaError as error:
            ends[name] = error

    with OrcaClient(server.grpc_url, retries=0) as client:
        readers = [threading.Thread(target=read, args=(name, client, n)) for name, n in plans.items()]
        for reader, first in zip(readers, begun.values(), strict=True):
            reader.start()
            assert first.wait(20)
        os.kill(server.pid, signal.SIGTERM)
        told = time.monotonic()
        time.sleep(0.5)
        with pytest.raises(Unavailable):
            client.generate(PROMPT, max_tokens=1)
        for reader in readers:
            reader.join(60)
        assert DRAIN - 1 < time.monotonic() - told < DRAIN + 10
    assert isinstance(ends["short"], Finished)
    assert ends["short"].num_output_tokens == 12
    for name in ("long", "endless"):
        assert isinstance(ends[name], Unavailable)
        assert "the server is stopping" in str(ends[name])
    assert server.wait() == 0
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    log = server.log_path.read_text()
    assert "Exit timeout expired" not in log
    assert "is not healthy" not in log
