"""The load generator: requests over gRPC streams, and when every event came. A process of its own.

    python -m loadtest.generator < Load > Outcome      (JSON; see loadtest/load.py)

One event loop and one channel: with more threads the generator would take more of the cores that the server needs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from loadtest.load import Load, Outcome, Record, Session, Turn
from orca_client import AsyncOrcaClient, Message, OrcaError, SamplingOptions, TextDelta

ROOT = Path(__file__).resolve().parents[1]


class GeneratorError(RuntimeError):
    """The generator itself failed."""


def generate(load: Load) -> Outcome:
    """Send `load` from a process of its own; every request is in the outcome, well or failed. Raises GeneratorError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.generator"],
        input=msgspec.json.encode(load),
        stdout=subprocess.PIPE,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise GeneratorError(f"the load generator ended with code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Outcome)


class Generator:
    """Sends one load."""

    def __init__(self, load: Load, client: AsyncOrcaClient) -> None:
        """The clock starts here."""
        self._load = load
        self._client = client
        self._records: list[Record] = []
        self._started = time.monotonic()

    async def run(self) -> Outcome:
        """Send everything; returns when every request has ended."""
        process = psutil.Process()
        before = process.cpu_times()
        closed = self._closed_loop()
        # In a closed loop the streams take turns at one iterator; in an open one every session has its own task.
        senders = [self._follow(closed) for _ in range(self._load.streams)]
        due = [self._at(i, session) for i, session in enumerate(self._load.sessions) if session.at is not None]
        await asyncio.gather(*senders, *due)
        wall, after = self._now(), process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        self._records.sort(key=lambda record: record.sent)
        return Outcome(started=self._started, wall=wall, cpu=cpu, records=self._records)

    def _closed_loop(self) -> Iterator[tuple[int, Session]]:
        """Sessions without a time, once or, if there is an end, over and over until then."""
        sessions = [(i, session) for i, session in enumerate(self._load.sessions) if session.at is None]
        if self._load.until is None:
            yield from sessions
            return
        for numbered in itertools.cycle(sessions):
            if self._now() >= self._load.until:
                return
            yield numbered

    async def _follow(self, sessions: Iterator[tuple[int, Session]]) -> None:
        for number, session in sessions:
            await self._converse(number, session, self._now())

    async def _at(self, number: int, session: Session) -> None:
        assert session.at is not None
        await asyncio.sleep(session.at - self._now())
        await self._converse(number, session, session.at)

    async def _converse(self, number: int, session: Session, scheduled: float) -> None:
        """The turns of a session, one after the other; the first failure ends it."""
        messages: list[Message] = []
        for i, turn in enumerate(session.turns):
            if i:
                scheduled = self._now() + turn.pause
                await asyncio.sleep(turn.pause)
            record = Record(session=number, turn=i, prompt_tokens=turn.prompt_tokens, max_tokens=turn.max_tokens)
            record.scheduled = scheduled
            self._records.append(record)
            if session.chat:
                messages.append({"role": "user", "content": turn.prompt})
            answer = await self._stream(turn, messages, record)
            if record.error:
                return
            messages.append({"role": "assistant", "content": answer})

    async def _stream(self, turn: Turn, messages: list[Message], record: Record) -> str:
        """Send one request and follow its answer."""
        load, text = self._load, []
        sampling: SamplingOptions = {"max_tokens": turn.max_tokens, "temperature": 0.0, "ignore_eos": True}
        record.sent = self._now()
        try:
            if messages:
                events = self._client.stream_chat(messages, model=load.model, timeout=load.timeout, **sampling)
            else:
                events = self._client.stream(turn.prompt, model=load.model, timeout=load.timeout, **sampling)
            async for event in events:
                if isinstance(event, TextDelta):
                    record.times.append(self._now())
                    record.tokens.append(event.num_tokens)
                    text.append(event.text)
                else:
                    record.finish_reason = event.finish_reason
                    record.prompt_tokens = event.num_input_tokens
            if record.num_tokens != turn.max_tokens:
                record.error = f"{record.num_tokens} tokens instead of {turn.max_tokens}"
        except OrcaError as error:
            record.error = f"{type(error).__name__}: {error.message}"
        record.ended = self._now()
        return "".join(text)

    def _now(self) -> float:
        return time.monotonic() - self._started


async def main() -> None:
    """One load from stdin."""
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    async with AsyncOrcaClient(load.url, retries=0) as client:
        await client.server_ready()  # the connection is made before the clock starts
        outcome = await Generator(load, client).run()
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    asyncio.run(main())
