"""What is asked of every system: the same lists of requests, from a fixed seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from bench.peers.adapters.protocol import Request
from loadtest.arrivals import poisson
from loadtest.load import Turn
from loadtest.workload import Arrivals, Workload
from orca_backend.serving.tokenizer import Tokenizer

KINDS = ("workload", "decode", "prefill", "online")
_FIRST_TOKEN = 100  # below are special tokens in the models at hand


@dataclass(frozen=True)
class Task:
    """`name` is the workload's, with the batch size where it has one; `kind` says which metrics are taken."""

    name: str
    kind: str
    requests: list[Request]


@dataclass(frozen=True)
class Sizes:
    """How much of each task. The defaults are what is reported; `quick()` only shows that everything works."""

    requests: int = 64
    prompt: tuple[int, int] = (32, 512)
    output: tuple[int, int] = (1, 128)
    max_running: int = 32
    decode_batches: tuple[int, ...] = (1, 8, 32)
    decode_prompt: int = 128
    decode_output: int = 128
    prefill_requests: int = 8
    prefill_prompt: int = 512
    online_requests: int = 110
    online_rate: float = 2.2  # requests a second

    @classmethod
    def quick(cls) -> Sizes:
        """A smoke test."""
        return cls(
            requests=6,
            prompt=(8, 48),
            output=(1, 8),
            max_running=4,
            decode_batches=(1, 4),
            decode_prompt=16,
            decode_output=8,
            prefill_requests=2,
            prefill_prompt=64,
            online_requests=6,
            online_rate=8.0,
        )

    @property
    def max_tokens(self) -> int:
        """The longest request, prompt and output together."""
        return max(self.prompt[1] + self.output[1], self.decode_prompt + self.decode_output, self.prefill_prompt + 1)


def make_tasks(kinds: list[str], sizes: Sizes, vocab_size: int, seed: int = 0) -> list[Task]:
    """The tasks of the kinds "workload", "decode" (one per batch size) and "prefill", in that order.

    Prompts are random tokens: no prefix is shared, and no system profits from having seen text.
    """
    rng = random.Random(seed)

    def request(prompt: int, output: int) -> Request:
        return Request([rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(prompt)], output)

    workload = [request(rng.randint(*sizes.prompt), rng.randint(*sizes.output)) for _ in range(sizes.requests)]
    tasks = [Task("workload", "workload", workload)]
    for batch in sizes.decode_batches:
        rows = [request(sizes.decode_prompt, sizes.decode_output) for _ in range(batch)]
        tasks.append(Task(f"decode-{batch}", "decode", rows))
    tasks.append(Task("prefill", "prefill", [request(sizes.prefill_prompt, 1) for _ in range(sizes.prefill_requests)]))
    return [task for task in tasks if task.kind in kinds]


def make_turns(sizes: Sizes, checkpoint: Path, count: int, seed: int) -> list[Turn]:
    """`count` requests of the lengths of the workload, whose prompts are texts."""
    prompt, output = (f"{least}-{most}" for least, most in (sizes.prompt, sizes.output))
    sessions = Workload(f"uniform:{prompt},{output}", checkpoint).sessions(count, Arrivals(kind="closed"), seed)
    return [turn for session in sessions for turn in session.turns]


def make_online_task(sizes: Sizes, checkpoint: Path, seed: int = 1) -> Task:
    """Requests of the lengths of the workload that come one by one, as a Poisson process."""
    encode = Tokenizer(checkpoint).encode
    turns = make_turns(sizes, checkpoint, sizes.online_requests, seed)
    due = poisson(sizes.online_requests, sizes.online_rate, seed)
    requests = [
        Request(encode(turn.prompt), turn.max_tokens, at, turn.prompt) for turn, at in zip(turns, due, strict=True)
    ]
    return Task("online", "online", requests)
