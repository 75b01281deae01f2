"""Our whole server: tritonserver, and gRPC streams of our SDK from the load generator's process."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from protocol import Answers, Request, serve
from serve_ours import MODEL, REPOSITORY, engine_settings

from loadtest.generator import generate
from loadtest.load import Load, Session, Turn
from orca_backend import __version__
from orca_backend.server import TritonServer


class OursServed:
    """Requests need their prompts as text, and a time at which they are due. Options as for the engine alone."""

    def load(self, model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Start the server."""
        settings = engine_settings(model, options)
        self._server = TritonServer(REPOSITORY, models=[MODEL], overrides=settings, log="-")
        self._server.__enter__()
        atexit.register(self._server.stop)
        return {"version": __version__, "engine": options.get("engine", {})}

    def run(self, requests: list[Request]) -> Answers:
        """Send everything when it is due. The clock is the generator's. Raises RuntimeError if a request failed."""
        answers = Answers(requests)
        sessions = [
            Session([Turn(request.prompt, len(request.prompt_ids), request.max_new_tokens)], request.at)
            for request in requests
        ]
        for record in generate(Load(url=self._server.grpc_url, sessions=sessions, model=MODEL)).records:
            if record.error:
                raise RuntimeError(f"request {record.session}: {record.error}")
            for time, count in zip(record.times, record.tokens, strict=True):
                answers.token_ids[record.session] += [None] * count
                answers.times[record.session] += [time] * count
        return answers


if __name__ == "__main__":
    serve(OursServed())
