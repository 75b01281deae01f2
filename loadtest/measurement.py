"""One load on one server, measured from both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from loadtest.generator import generate
from loadtest.load import Load, Outcome, Session
from loadtest.machine import ROOT
from loadtest.server_metrics import Moment, Monitor
from loadtest.summary import Slo, Summary, summarize
from orca_backend.config import load_config
from orca_backend.server import TritonServer

REPOSITORY = ROOT / "model_repository"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server under load: `url` is host:port of gRPC; `checkpoint` has the served tokenizer.

    `metrics_url` None leaves the server's own view out. `pids` gives its processes, where they are ours to look at.
    """

    url: str
    checkpoint: Path
    model: str = "orca"
    metrics_url: str | None = None
    pids: Callable[[], Sequence[int]] = list


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a load, and what the server said of itself meanwhile."""

    outcome: Outcome
    summary: Summary
    moments: list[Moment]


@contextlib.contextmanager
def serving(
    settings: Mapping[str, Any], console: Console, *, model: str = "orca", name: str = "loadtest"
) -> Iterator[Target]:
    """A server of `model` with `settings` of engine.yaml (by dotted names), ready. Raises ServerError, ConfigError."""
    config = load_config(REPOSITORY / model / "1" / "engine.yaml", dict(settings), origin="--set")
    server = TritonServer(REPOSITORY, models=[model], overrides=settings, console=console, name=name)
    with server:
        yield Target(
            url=server.grpc_url,
            checkpoint=Path(config.model),
            model=model,
            metrics_url=server.metrics_url,
            pids=lambda: [server.pid, *server.stub_pids, *server.engine_pids],
        )


def measure(
    target: Target,
    sessions: list[Session],
    *,
    streams: int = 1,
    until: float | None = None,
    warmup: float = 0.0,
    slo: Slo | None = None,
    timeout: float = 600.0,
) -> Measurement:
    """Send `sessions` (see Load for `streams` and `until`) to `target`; `warmup` seconds of it are not counted."""
    load = Load(url=target.url, model=target.model, sessions=sessions, streams=streams, until=until, timeout=timeout)
    with contextlib.ExitStack() as stack:
        moments: list[Moment] = []
        if target.metrics_url:
            moments = stack.enter_context(Monitor(target.metrics_url, target.model, target.pids)).moments
        outcome = generate(load)
    return Measurement(outcome=outcome, summary=summarize(outcome, warmup=warmup, slo=slo), moments=moments)
