"""Drive a real engine process without Triton: requests in, collected answers and iteration reports out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from orca_backend.channel import Cancel, EngineInfo, Heartbeat, IterationReport, Occupancy, Ready, Submit
from orca_backend.config import EngineConfig
from orca_backend.request import Request, SamplerSettings
from orca_backend.serving.engine_client import spawn_engine


@dataclass
class Answer:
    """What has come for one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    code: str = ""
    message: str = ""


class EngineProcess:
    """Context manager: an engine process that is Ready, and one thread's view of what it says."""

    def __init__(self, config: EngineConfig) -> None:
        self.channel, self.process = spawn_engine(config)
        self.answers: dict[int, Answer] = {}
        self.reports: list[IterationReport] = []
        self.occupancy = Occupancy()
        self.first_message = self.channel.receive()

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when it became ready."""
        assert isinstance(self.first_message, Ready), self.first_message
        return self.first_message.info

    def submit(self, prompt_ids: list[int], max_new_tokens: int, stop_token_ids: Any = (), **sampling: Any) -> int:
        """Submit one request; its id."""
        request = Request(
            request_id=len(self.answers) + 1,
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=list(stop_token_ids),
            sampling=SamplerSettings(**sampling),
        )
        self.answers[request.request_id] = Answer(request)
        self.channel.send(Submit(request))
        return request.request_id

    def cancel(self, request_id: int) -> None:
        """Ask for the end of one request."""
        self.channel.send(Cancel(request_id))

    def receive(self) -> None:
        """Take in one message. A second terminal event, or news after it, is an error."""
        message = self.channel.receive()
        assert isinstance(message, (IterationReport, Heartbeat)), message
        self.occupancy = message.occupancy
        if isinstance(message, Heartbeat):
            return
        if message.num_rows:
            self.reports.append(message)
        for event in message.events:
            answer = self.answers[event.request_id]
            assert answer.finish_reason is None, f"news after the end of {event.request_id}: {event}"
            answer.token_ids += event.token_ids
            answer.finish_reason, answer.code, answer.message = event.finish_reason, event.code, event.message

    def finish(self, timeout: float = 120.0) -> list[Answer]:
        """Take in messages until every request has ended and a heartbeat confirms it; all answers by request id."""
        deadline = time.monotonic() + timeout
        while any(answer.finish_reason is None for answer in self.answers.values()):
            self.receive()
            assert time.monotonic() < deadline, "requests do not end"
        while self.occupancy.running or self.occupancy.waiting:
            self.receive()
        return list(self.answers.values())

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
