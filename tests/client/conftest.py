from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mock_prompts import MOCK_MODELS, MODEL

from orca_backend.server import TritonServer
from orca_client import OrcaClient


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A real tritonserver with a model that does what its prompts say."""
    with TritonServer(MOCK_MODELS, log=tmp_path_factory.mktemp("server") / "tritonserver.log") as server:
        yield server
        # Triton keeps a model loaded, so does not stop in time, if a stream is cancelled just after its last response.
        assert server.stop() == 0


@pytest.fixture
def client(server: TritonServer) -> Iterator[OrcaClient]:
    with OrcaClient(server.grpc_url) as client:
        yield client


@pytest.fixture
def report(client: OrcaClient) -> Callable[[str], dict[str, Any]]:
    """What the model knows of a request by its id ("" is the latest)."""
    return lambda request_id: json.loads(client.generate(json.dumps({"report": request_id}), model=MODEL).text)


@pytest.fixture
def sees_cancel(report: Callable[[str], dict[str, Any]]) -> Callable[[str], bool]:
    """Whether the model notices that a request is cancelled."""

    def wait(request_id: str) -> bool:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if report(request_id).get("state") == "cancelled":
                return True
            time.sleep(0.02)
        return False

    return wait


@pytest.fixture(autouse=True)
def _no_long_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_client.retry.FIRST_BACKOFF_S", 0.02)
