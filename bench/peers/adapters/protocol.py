"""One system under test is one process that speaks JSON lines: load, run, quit. Standard library only.

    {"op": "load", "model": PATH, "options": {...}}                      -> {"info": {...}, "seconds": S}
    {"op": "run", "requests": [{"prompt_ids": [...], "max_new_tokens": N, "at": S, "prompt": TEXT}]}
                                                                         -> {"token_ids", "times", "wall"}
    {"op": "quit"}                                                       -> the process ends

An exception answers {"error": TEXT, "trace": TEXT}. All times are seconds since the run began, on the system's own
clock, so that the pipe to the driver is in no measurement. Options that every adapter understands:

    threads      compute threads
    max_running  at most this many requests in one batch
    max_tokens   the longest request, prompt and output together
    dtype        "bf16" or "fp32"
    weights      "none" (as `dtype`) or "int8"
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass
class Request:
    """Token ids in; exactly `max_new_tokens` greedy tokens out, whatever they are (ends of sequence are ignored).

    It is due `at` seconds after the run began. `prompt` is the same prompt as text, if it has one, for systems that
    take nothing else.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    at: float = 0.0
    prompt: str = ""


@dataclass
class Answers:
    """What came for each request: its token ids, and when each of them came (seconds since the run began).

    A system that gives text only knows how many tokens came; their ids are None.
    """

    requests: list[Request]  # in the order in which they are due
    token_ids: list[list[int | None]] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start the clock."""
        self.token_ids = [[] for _ in self.requests]
        self.times = [[] for _ in self.requests]
        self._handed_out = 0
        self._started = time.perf_counter()

    def add(self, index: int, token_ids: list[int]) -> None:
        """Note tokens of request `index` that came now."""
        self.token_ids[index] += token_ids
        self.times[index] += [self._now()] * len(token_ids)

    def until_next(self) -> float | None:
        """Seconds until the next request is due, 0 if it is already; None if all were handed out."""
        if self._handed_out == len(self.requests):
            return None
        return max(0.0, self.requests[self._handed_out].at - self._now())

    def due(self, *, wait: bool) -> list[tuple[int, Request]]:
        """Requests that have become due, with their numbers, each once. If they are to be waited for: none, no more."""
        if wait and (seconds := self.until_next()):
            time.sleep(seconds)
        first = self._handed_out
        while self.until_next() == 0.0:
            self._handed_out += 1
        return list(enumerate(self.requests))[first : self._handed_out]

    def _now(self) -> float:
        return time.perf_counter() - self._started


class System(Protocol):
    """What an adapter implements."""

    def load(self, model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Load the checkpoint; facts for the report (version, precision, settings)."""
        ...

    def run(self, requests: list[Request]) -> Answers:
        """Serve all requests, each submitted when it is due."""
        ...


def serve(system: System) -> None:
    """Answer commands on stdin until "quit" or the end of the input."""
    # Libraries print to stdout; the answers get a descriptor of their own and the rest joins the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "quit":
            break
        try:
            reply = _load(system, command) if command["op"] == "load" else _run(system, command)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _load(system: System, command: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    info = system.load(Path(command["model"]), command["options"])
    return {"info": info, "seconds": time.perf_counter() - started}


def _run(system: System, command: dict[str, Any]) -> dict[str, Any]:
    answers = system.run([Request(**request) for request in command["requests"]])
    last = max((times[-1] for times in answers.times if times), default=0.0)
    return {"token_ids": answers.token_ids, "times": answers.times, "wall": last}
