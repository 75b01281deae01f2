"""From what came and when, to the numbers that are compared."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.peers.workload import Task

# The numbers by which systems are compared, for each kind of task. Of latencies (ms) less is better, of rates more.
HEADLINES = {
    "workload": ["requests/s"],
    "decode": ["tokens/s"],
    "prefill": ["tokens/s"],
    "online": [
        *(f"{name} p{percent} ms" for name in ("gap", "first token", "normalized latency") for percent in (50, 99)),
        "requests/s",
    ],
}


class WrongOutputError(Exception):
    """A system did not do the work that was asked."""


@dataclass(frozen=True)
class Outcome:
    """One run of one task on one system; times in seconds since the run began. Ids are None where only text came."""

    token_ids: Sequence[Sequence[int | None]]
    times: list[list[float]]
    wall: float


def check(task: Task, outcome: Outcome) -> None:
    """Raise WrongOutputError unless every request got exactly the tokens it asked for."""
    for i, (request, ids, times) in enumerate(zip(task.requests, outcome.token_ids, outcome.times, strict=True)):
        if len(ids) != request.max_new_tokens or len(times) != len(ids):
            raise WrongOutputError(
                f"{task.name}: request {i} asked for {request.max_new_tokens} tokens and got {len(ids)}"
            )


def measure(task: Task, outcome: Outcome) -> dict[str, float]:
    """Metrics of a checked outcome; rates per second, latencies in milliseconds.

    `tokens/s` of a decode task counts only the time in which the whole batch decodes: after the last request's first
    token, until the first request's last one. `tokens/s` of a prefill task counts prompt tokens until the last first
    token. Latencies count from when a request was due; gaps are between events, whatever they bring.
    """
    if task.kind in ("workload", "online"):
        return _requests(task, outcome)
    if task.kind == "prefill":
        prompt_tokens = sum(len(request.prompt_ids) for request in task.requests)
        return {"tokens/s": prompt_tokens / max(times[0] for times in outcome.times)}
    begin = max(times[0] for times in outcome.times)
    end = min(times[-1] for times in outcome.times)
    tokens = sum(begin < time <= end for times in outcome.times for time in times)
    if not tokens:
        raise WrongOutputError(f"{task.name}: at no time did the whole batch decode together")
    generated = sum(len(ids) for ids in outcome.token_ids)
    return {"tokens/s": tokens / (end - begin), "tokens/s with prefill": generated / outcome.wall}


def _requests(task: Task, outcome: Outcome) -> dict[str, float]:
    generated = sum(len(ids) for ids in outcome.token_ids)
    pairs = list(zip(task.requests, outcome.times, strict=True))
    latencies = {
        "first token": [times[0] - request.at for request, times in pairs],
        "gap": [b - a for times in outcome.times for a, b in itertools.pairwise(sorted(set(times)))],
        "normalized latency": [(times[-1] - request.at) / len(times) for request, times in pairs],
    }
    return {
        "requests/s": len(task.requests) / outcome.wall,
        "wall s": outcome.wall,
        "generated tokens/s": generated / outcome.wall,
        **{f"{name} p50 ms": 1e3 * statistics.median(values) for name, values in latencies.items()},
        **{f"{name} p99 ms": 1e3 * statistics.quantiles(values, n=100)[98] for name, values in latencies.items()},
    }


def agreement(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """How many answers equal the reference's, and how much of an answer does before the first difference (0 to 1).

    Precisions differ, so answers part after some tokens; an agreement near nothing means another model.
    """
    pairs = list(zip(outcome.token_ids, reference.token_ids, strict=True))
    shares = []
    for ours, theirs in pairs:
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        shares.append(same / len(ours))
    return {"equal": sum(a == b for a, b in pairs), "of": len(pairs), "mean equal prefix": statistics.mean(shares)}
