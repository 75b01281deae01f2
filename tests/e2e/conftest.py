"""Few servers with the real engine, since each start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import Greedy
from servers import MAX_MODEL_LEN, new_server

from orca_backend.server.triton_server import TritonServer
from orca_client import OrcaClient


@pytest.fixture(scope="session")
def greedy(smollm2: Path) -> Greedy:
    return Greedy(smollm2)


@pytest.fixture(scope="session")
def smol(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """SmolLM2 under both models, idle between tests."""
    log = tmp_path_factory.mktemp("smol") / "triton.log"
    settings = {"limits__max_model_len": MAX_MODEL_LEN, "limits__drain_timeout": 5.0}
    with new_server(smollm2, log, ["orca", "static_baseline"], **settings) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def sdk(smol: TritonServer) -> Iterator[OrcaClient]:
    with OrcaClient(smol.grpc_url, retries=0) as client:
        yield client
