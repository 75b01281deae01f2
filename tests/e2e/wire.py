"""What a test sees from outside: raw gRPC calls response by response, HTTP, and the numbers on /metrics."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from orca_backend.server.triton_server import TritonServer

QUIET = 0.1  # seconds after the end of a call in which nothing more may come
_DTYPES = {bool: ("BOOL", np.bool_), str: ("BYTES", np.object_), bytes: ("BYTES", np.object_), int: ("INT32", np.int32)}
_DTYPES[float] = ("FP32", np.float32)


@dataclass
class Response:
    """One response of a stream, or the error that came in its place; `at` is a value of time.monotonic()."""

    at: float
    final: bool
    error: str = ""
    status: str = ""  # of an error that has ended the stream itself
    outputs: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.outputs["text_output"].decode()


class RawCall:
    """One request on a gRPC stream of its own, through tritonclient as it is: every response, in order."""

    def __init__(
        self,
        server: TritonServer,
        inputs: Mapping[str, Any],
        *,
        model: str = "orca",
        empty_final: bool = False,
        request_id: str = "",
        timeout_us: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send at once. `empty_final` is tritonclient's enable_empty_final_response."""
        self.responses: list[Response] = []
        self._news = Condition()
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(self._receive, headers=dict(headers or {}))
        self.sent_at = time.monotonic()
        self._client.async_stream_infer(
            model,
            [_tensor(name, value) for name, value in inputs.items()],
            request_id=request_id,
            timeout=timeout_us,
            enable_empty_final_response=empty_final,
        )

    def _receive(self, result: Any, error: Any) -> None:
        at = time.monotonic()
        if error is not None:
            response = Response(at, final=True, error=error.message(), status=error.status() or "")
        else:
            message = result.get_response()
            names = [output.name for output in message.outputs]
            outputs = {name: result.as_numpy(name)[0] for name in names}
            response = Response(
                at, message.parameters["triton_final_response"].bool_param, outputs=outputs, names=names
            )
        with self._news:
            self.responses.append(response)
            self._news.notify_all()

    def first(self, timeout: float = 60.0) -> Response:
        """Wait for the first response."""
        with self._news:
            assert self._news.wait_for(lambda: self.responses, timeout), "no response"
        return self.responses[0]

    def finish(self, timeout: float = 60.0) -> list[Response]:
        """Wait for the end, see that nothing comes after it, and close: every response."""
        with self._news:
            assert self._news.wait_for(lambda: any(r.final for r in self.responses), timeout), "the call does not end"
        time.sleep(QUIET)
        assert [r.final for r in self.responses] == [False] * (len(self.responses) - 1) + [True]
        self.close()
        return self.responses

    def error(self, timeout: float = 60.0) -> str:
        """The one error that the call ends with."""
        responses = self.finish(timeout)
        assert [bool(r.error) for r in responses] == [False] * (len(responses) - 1) + [True], responses
        return responses[-1].error

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.responses)

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def _tensor(name: str, value: Any) -> grpcclient.InferInput:
    if isinstance(value, np.ndarray):  # as it is, for shapes and types that the model does not take
        dtype = {"uint32": "UINT32", "uint64": "UINT64", "object": "BYTES", "int32": "INT32"}[str(value.dtype)]
        array = value
    else:
        values = value if isinstance(value, list) else [value]
        dtype, kind = _DTYPES[type(values[0])]
        array = np.array(values, dtype=kind)
    tensor = grpcclient.InferInput(name, list(array.shape), dtype)
    tensor.set_data_from_numpy(array)
    return tensor


def post(
    server: TritonServer, body: Mapping[str, Any] | bytes, path: str = "generate", model: str = "orca"
) -> tuple[int, str]:
    """HTTP status and body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/models/{model}/{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sse(body: str) -> list[dict[str, Any]]:
    """The events of a server-sent stream, every line of which must be one."""
    assert body.endswith("\n\n")
    return [json.loads(re.fullmatch("data: (.*)", line)[1]) for line in body.split("\n\n")[:-1]]  # type: ignore[index]


def metrics(server: TritonServer) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every sample on /metrics by name: its labels and its value."""
    with urllib.request.urlopen(server.metrics_url, timeout=60) as response:
        text = response.read().decode()
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in re.findall(r"^([\w:]+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        samples.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return samples


def metric(server: TritonServer, name: str, model: str = "orca", **labels: str) -> float:
    """The value of the one sample with this name and these labels."""
    wanted = {"model": model, **labels}.items()
    (value,) = [value for own, value in metrics(server)[name] if wanted <= own.items()]
    return value


def wait_until(condition: Callable[[], bool], timeout: float = 60.0, pause: float = 0.02) -> float:
    """Wait until `condition()` holds; when it did, as a value of time.monotonic().

    A shorter timeout is a promise under test; the default only ends a test that would wait for ever.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout} s"
        time.sleep(pause)
    return time.monotonic()


def wait_until_idle(server: TritonServer, model: str = "orca", timeout: float = 60.0) -> float:
    """Wait until /metrics says that nothing runs, nothing waits and no slot is reserved."""

    def idle() -> bool:
        values = [metric(server, f"orca_requests_{state}", model) for state in ("running", "waiting")]
        return not any([*values, metric(server, "orca_kv_slots", model, state="reserved")])

    return wait_until(idle, timeout)
