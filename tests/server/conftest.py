from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_backend.server import TritonServer

REPOSITORY = Path(__file__).parent / "repository"


@pytest.fixture(scope="session")
def streamer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A real tritonserver with the streamer model, one setting changed."""
    log = tmp_path_factory.mktemp("streamer") / "server.log"
    with TritonServer(REPOSITORY, models=["streamer"], overrides={"scheduler.max_bs": 3}, log=log) as server:
        yield server
