"""The serving room inside a real stub of a real tritonserver, with a real engine on a small random model."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from orca_backend.server.triton_server import TritonServer
from orca_backend.serving.metrics import PERIOD

REPOSITORY = Path(__file__).resolve().parents[2]
FOREVER = 400  # tokens: seconds of work for the small model

DTYPES = {bool: "BOOL", str: "BYTES", int: "INT32", float: "FP32"}


def start(model: Path, directory: Path, **overrides: Any) -> TritonServer:
    # Plain torch is slow enough that a request is still running when a test does something to it.
    settings = {"model": str(model), "kv_cache.memory": "64MiB", "threads": 1, "kernels": "torch"}
    settings |= {name.replace("__", "."): value for name, value in overrides.items()}
    return TritonServer(REPOSITORY / "model_repository", overrides=settings, log=directory / "triton.log")


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with start(tiny_llama, tmp_path_factory.mktemp("live")) as running:
        yield running


class Stream:
    """One gRPC stream; what comes on it, with the time."""

    def __init__(self, server: TritonServer) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc_url)
        self.answers: queue.SimpleQueue[tuple[Any, Any, float]] = queue.SimpleQueue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error, time.monotonic())))

    def ask(self, text: str | bytes, request_id: str = "", timeout: int | None = None, **inputs: Any) -> None:
        tensors = []
        for name, value in {"text_input": text, **inputs}.items():
            values = value if isinstance(value, list) else [value]
            dtype = "BYTES" if isinstance(values[0], bytes) else DTYPES[type(values[0])]
            tensor = grpcclient.InferInput(name, [len(values)], dtype)
            kind = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}[dtype]
            tensor.set_data_from_numpy(np.array(values, dtype=kind))
            tensors.append(tensor)
        self.client.async_stream_infer("orca", tensors, request_id=request_id, timeout=timeout)

    def next(self, timeout: float = 20.0) -> tuple[str, bool]:
        """Text and final flag of the next response; raises the error if it is one."""
        result, error, _ = self.answers.get(timeout=timeout)
        if error is not None:
            raise error
        response = result.get_response()
        assert response.outputs[0].name == "text_output"
        return (
            result.as_numpy("text_output")[0].decode(),
            response.parameters["triton_final_response"].bool_param,
        )

    def all(self) -> list[tuple[str, bool]]:
        answers = [self.next()]
        while not answers[-1][1]:
            answers.append(self.next())
        return answers

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


Connect = Callable[[TritonServer], Stream]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens streams that are closed after the test: one that is left open would delay the end of the server."""
    streams: list[Stream] = []

    def opened(server: TritonServer) -> Stream:
        streams.append(Stream(server))
        return streams[-1]

    yield opened
    for stream in streams:
        stream.close(cancel=True)


@pytest.fixture
def stream(server: TritonServer, connect: Connect) -> Stream:
    return connect(server)


def post(server: TritonServer, body: dict[str, Any], path: str = "generate") -> tuple[int, Any]:
    request = urllib.request.Request(f"{server.http_url}/v2/models/orca/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read().decode()
            return response.status, json.loads(text) if path == "generate" else text
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def metric(server: TritonServer, name: str, **labels: str) -> float:
    with urllib.request.urlopen(server.metrics_url, timeout=60) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name} {labels}")


def wait_for(condition: Any, timeout: float = 30.0) -> float:
    """Seconds until `condition()` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, "it did not become true"
        time.sleep(0.02)
    return time.monotonic() - began


def test_stream_is_the_whole_text_and_ends_once(server: TritonServer, stream: Stream) -> None:
    settings = {"max_tokens": 40, "temperature": 0.0}
    stream.ask("The sky", stream=True, **settings)
    answers = stream.all()
    status, whole = post(server, {"text_input": "The sky", "exclude_input_in_output": True, **settings})
    assert status == 200
    assert "".join(text for text, _ in answers) == whole["text_output"]
    assert all(text for text, _ in answers[:-1])
    time.sleep(0.1)
    assert stream.answers.empty()


def test_prompt_is_prepended_unless_excluded(server: TritonServer) -> None:
    _, with_prompt = post(server, {"text_input": "The sky", "max_tokens": 5, "temperature": 0.0})
    _, without = post(
        server, {"text_input": "The sky", "max_tokens": 5, "temperature": 0.0, "exclude_input_in_output": True}
    )
    assert with_prompt["text_output"] == "The sky" + without["text_output"]


def test_counts_and_finish_reason(server: TritonServer) -> None:
    returns = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}
    body = {"text_input": "abcde", "parameters": {"ignore_eos": True}, "max_tokens": 7, **returns}
    status, answer = post(server, body)
    assert (status, answer["finish_reason"]) == (200, "length")
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (5, 7)
    _, events = post(server, {**body, "stream": True}, "generate_stream")
    events = [json.loads(line[6:]) for line in events.splitlines() if line]
    assert [e["finish_reason"] for e in events] == ["None"] * (len(events) - 1) + ["length"]
    assert sum(e["num_output_tokens"] for e in events) == 7
    assert all(e["num_input_tokens"] == 5 for e in events)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"text_input": ""}, "[INVALID_ARG] text_input"),
        ({"text_input": "x", "temprature": 0.5}, "[INVALID_ARG] temprature"),
        ({"text_input": "x", "beam_width": 4}, "[UNSUPPORTED] beam_width"),
        ({"text_input": "x", "timeout": -5}, "[INVALID_ARG] timeout"),
        ({"text_input": "x", "sampling_parameters": '{"stop": ' + "[" * 100_000}, "[INVALID_ARG] sampling_parameters"),
        ({"text_input": "x" * 512}, "512 tokens, but the limit is 512"),
        ({"text_input": "x", "apply_chat_template": True}, "[INVALID_ARG] text_input"),
        ({"text_input": '[{"role":"user","content":"x"}]', "apply_chat_template": True}, "no chat template"),
    ],
)
def test_a_bad_request_gets_one_clear_error(server: TritonServer, inputs: dict[str, Any], text: str) -> None:
    status, answer = post(server, inputs)
    assert status == 400  # Triton's `generate` has no other for an error that is a response
    assert text in answer["error"]
    assert post(server, {"text_input": "x", "max_tokens": 1})[0] == 200


def test_bytes_that_are_no_utf8(stream: Stream) -> None:
    stream.ask(b"\xff", stream=True)
    with pytest.raises(Exception, match=r"\[INVALID_ARG\] text_input: not valid UTF-8"):
        stream.next()
    stream.ask("x", max_tokens=1)
    assert stream.next()[1]


def test_a_client_that_leaves_frees_its_slots(server: TritonServer, stream: Stream) -> None:
    before = metric(server, "orca_failures_total", reason="CANCELLED")
    stream.ask("The sky", stream=True, max_tokens=FOREVER, sampling_parameters='{"ignore_eos": true}')
    stream.next()
    stream.close(cancel=True)  # at once: on a busy machine it might otherwise come to its end
    # Metrics are published every half second; what is measured is that plus the noticing.
    wait_for(lambda: metric(server, "orca_failures_total", reason="CANCELLED") == before + 1, timeout=20)
    wait_for(lambda: metric(server, "orca_kv_slots", state="reserved") == 0, timeout=20)


def test_deadline_of_the_request(stream: Stream) -> None:
    stream.ask("The sky", timeout=200_000, max_tokens=FOREVER, sampling_parameters='{"ignore_eos": true}')
    began = time.monotonic()
    with pytest.raises(Exception, match=r"\[UNAVAILABLE\] Request timeout expired"):
        stream.next()
    assert time.monotonic() - began > 0.15


def test_stop_tensor_cancels_by_request_id(server: TritonServer, stream: Stream, connect: Connect) -> None:
    stream.ask("The sky", "mine", stream=True, max_tokens=FOREVER, sampling_parameters='{"ignore_eos": true}')
    assert not stream.next()[1]
    other = connect(server)
    other.ask("ignored", "mine", stop=True)
    assert other.next() == ("", True)
    with pytest.raises(Exception, match=r"\[CANCELLED\]"):
        stream.all()


def test_metrics_of_one_request(server: TritonServer) -> None:
    names = (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "orca_iteration_tokens_sum",
    )
    time.sleep(2 * PERIOD)  # so that nothing of earlier requests is still to be published
    before = {name: metric(server, name) for name in names}
    post(server, {"text_input": "abcde", "max_tokens": 6, "parameters": {"ignore_eos": True}})
    time.sleep(2 * PERIOD)
    gained = {name: metric(server, name) - before[name] for name in names}
    assert gained == dict(zip(names, (6, 5, 1, 5, 1, 5 + 5), strict=True))
    assert metric(server, "orca_engine_heartbeat_age_seconds", model="orca", version="1", policy="orca") < 2


def test_killed_engine_fails_what_is_in_flight_and_comes_back(server: TritonServer, connect: Connect) -> None:
    streams = [connect(server) for _ in range(4)]
    for stream in streams:
        stream.ask("The sky", stream=True, max_tokens=FOREVER, sampling_parameters='{"ignore_eos": true}')
    for stream in streams:
        stream.next()
    (stub,) = server.stub_pids
    restarts = metric(server, "orca_engine_restarts_total")
    os.kill(server.engine_pids[0], signal.SIGKILL)
    for stream in streams:
        with pytest.raises(Exception, match=r"\[UNAVAILABLE\] the engine process died \(SIGKILL\)"):
            stream.all()
        assert stream.answers.empty()
    assert post(server, {"text_input": "x"})[1]["error"].startswith("[UNAVAILABLE] the engine")
    wait_for(lambda: post(server, {"text_input": "x", "max_tokens": 1})[0] == 200)
    assert server.stub_pids == [stub]
    wait_for(lambda: metric(server, "orca_engine_restarts_total") == restarts + 1)


def test_sigterm_under_load_ends_in_order(tiny_llama: Path, tmp_path: Path, connect: Connect) -> None:
    """In flight: a request that outlasts the drain timeout. The server must still end by itself, with code 0."""
    with start(tiny_llama, tmp_path, limits__drain_timeout=1.0) as server:
        engine = psutil.Process(server.engine_pids[0])
        time.sleep(0.5)  # the endpoints have just opened; the watcher must have seen them
        streams = [connect(server) for _ in range(3)]
        for stream in streams:
            stream.ask("The sky", stream=True, max_tokens=FOREVER, sampling_parameters='{"ignore_eos": true}')
            stream.next()
        os.kill(engine.pid, signal.SIGSTOP)  # so that nothing can end well in time
        os.kill(server.pid, signal.SIGTERM)
        for stream in streams:
            with pytest.raises(Exception, match=r"\[UNAVAILABLE\] the server is stopping"):
                stream.all()
            stream.close()  # Triton 2.51 keeps a model loaded while a gRPC stream that has used it is open
        os.kill(engine.pid, signal.SIGCONT)
        assert server.wait() == 0
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    log = (tmp_path / "triton.log").read_text()
    assert not re.search(r"Exit timeout expired|is not healthy", log)


def test_an_idle_http_connection_does_not_hold_up_the_drain(tiny_llama: Path, tmp_path: Path, connect: Connect) -> None:
    """Triton 2.51 waits for it with all sockets open; the requests in flight were once cut when that had lasted."""
    with start(tiny_llama, tmp_path, limits__drain_timeout=1.0) as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.http_port)
        idle.request("GET", "/v2/health/ready")
        idle.getresponse().read()
        stream = connect(server)
        stream.ask("The sky", stream=True, max_tokens=FOREVER, sampling_parameters='{"ignore_eos": true}')
        stream.next()
        engine = server.engine_pids[0]
        os.kill(engine, signal.SIGSTOP)  # so that it cannot end well in time
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(server.stop)
            with pytest.raises(Exception, match=r"\[UNAVAILABLE\] the server is stopping"):
                stream.all()
            os.kill(engine, signal.SIGCONT)
            stream.close()
            idle.close()
            assert stopped.result() == 0


def test_a_server_that_crashes_leaves_no_stub_and_no_engine(tiny_llama: Path, tmp_path: Path, connect: Connect) -> None:
    """Triton's stub waits for a dead server for ever; so did ours, with the engine and all its memory."""
    with start(tiny_llama, tmp_path) as server:
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) >= 2  # stub, engine
        connect(server).ask("The sky", stream=True, max_tokens=FOREVER, sampling_parameters='{"ignore_eos": true}')
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
