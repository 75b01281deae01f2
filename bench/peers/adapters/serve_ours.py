"""Our engine process, driven over its request channel as the Triton stub drives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from protocol import Answers, Request, serve

from bench.engine_process import EngineProcess
from bench.peers.environments import ROOT
from orca_backend import __version__
from orca_backend.config import load_config

REPOSITORY = ROOT / "model_repository"
MODEL = "orca"
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def engine_settings(model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What `options` mean for engine.yaml, by dotted names. `options["engine"]` may set any of its fields."""
    max_running = options["max_running"]
    return {
        "model": str(model.resolve()),
        "dtype": _DTYPES[options["dtype"]],
        "quantization": options["weights"],
        "threads": options["threads"],
        "scheduler.max_bs": max_running,
        "kv_cache.n_slots": max_running * options["max_tokens"],
        **_dotted(options.get("engine", {})),
    }


def _dotted(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


class Ours:
    """The engine, with the paper's scheduler unless the options say otherwise."""

    def load(self, model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Start the engine process."""
        config = load_config(REPOSITORY / MODEL / "1" / "engine.yaml", engine_settings(model, options))
        self._engine = EngineProcess(config)
        return {"version": __version__, **msgspec.to_builtins(self._engine.info)}

    def run(self, requests: list[Request]) -> Answers:
        """Submit what is due, and take in reports, until every request has ended."""
        engine = self._engine
        engine.reports.clear()
        answers = Answers(requests)
        index: dict[int, int] = {}
        unfinished = len(requests)
        while unfinished:
            for i, request in answers.due(wait=False):
                index[engine.submit(request.prompt_ids, request.max_new_tokens)] = i
            seconds = answers.until_next()
            if seconds is not None and not engine.channel.wait(seconds):
                continue
            seen = len(engine.reports)
            engine.receive()
            for report in engine.reports[seen:]:
                for event in report.events:
                    answers.add(index[event.request_id], event.token_ids)
                    unfinished -= event.finish_reason is not None
        return answers


if __name__ == "__main__":
    serve(Ours())
