"""All scheduling policies side by side on one workload, one engine, one amount of K/V memory: `make bench-policies`.

The requests come all at once and ask for more tokens than they will generate, as clients do: each ends at a stop token.
A first run without stop tokens finds out which token that can be, so that the lengths are as drawn from the seed. One
in four has a long prompt. Memory is short: it is what the policies treat differently. Every policy runs in an engine
process of its own, in interleaved rounds; `static_ft` in the first round only, for it takes as long as all the others.
Then the time to the first token behind a long system prompt that all requests share, with the prefix cache and without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.engine_process import EngineProcess
from bench.peers.environments import ROOT
from bench.peers.report import machine
from bench.summary import cell, spread
from orca_backend.channel import IterationReport
from orca_backend.config import POLICIES, EngineConfig

_FIRST_TOKEN = 100  # below are special tokens
SLOW = "static_ft"


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens. `limit` is what clients ask for, `output` what is generated."""

    requests: int = 40
    short: tuple[int, int] = (16, 64)
    long: int = 512
    output: tuple[int, int] = (8, 96)
    limit: int = 256
    slots: int = 3328  # about eight times prompt and limit of a mean request
    max_bs: int = 32
    token_budget: int = 128  # of sarathi: a chunk and the decodes take about twice as long as the decodes alone
    system_prompt: int = 1000
    question: int = 24
    followers: int = 8  # requests that find the system prompt in the cache

    @classmethod
    def quick(cls) -> Sizes:
        """A smoke test."""
        return cls(
            requests=6, short=(4, 8), long=40, output=(2, 6), limit=16, slots=160, system_prompt=100, followers=2
        )


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """What came of requests on one engine; times in seconds since the first was submitted."""

    asks: Sequence[Ask]
    tokens: list[list[int]]
    times: list[list[float]]
    reports: list[IterationReport]
    preemptions: int
    wall: float


def make_asks(sizes: Sizes, vocab_size: int, seed: int = 0) -> list[tuple[Ask, int]]:
    """The requests without stop tokens, and how many tokens each is to generate."""
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(length)]

    lengths = [sizes.long if i % 4 == 3 else rng.randint(*sizes.short) for i in range(sizes.requests)]
    return [(Ask(prompt(length), sizes.limit, seed=i), rng.randint(*sizes.output)) for i, length in enumerate(lengths)]


def with_stop_token(ask: Ask, generated: list[int], length: int) -> Ask:
    """Let `ask` end after about `length` of the tokens that it generates: at the nearest one that is new there."""
    new = [position for position, token in enumerate(generated) if token not in generated[:position]]
    nearest = min(new, key=lambda position: abs(position + 1 - length))
    return replace(ask, stop_token_ids=(generated[nearest],))


def run(engine: EngineProcess, asks: Sequence[Ask]) -> Run:
    """Submit everything at once, and take in what comes until all have ended. Raises RuntimeError if one fails."""
    engine.reports.clear()
    before = engine.occupancy.preemptions
    started = time.perf_counter()
    # Sampled, not greedy: greedy answers of a small model soon repeat themselves, and then no token of theirs is new.
    ids = [
        engine.submit(ask.prompt_ids, ask.max_new_tokens, ask.stop_token_ids, temperature=1.0, seed=ask.seed)
        for ask in asks
    ]
    times: dict[int, list[float]] = {request_id: [] for request_id in ids}
    while any(engine.answers[request_id].finish_reason is None for request_id in ids):
        counts = {request_id: len(engine.answers[request_id].token_ids) for request_id in ids}
        engine.receive()
        now = time.perf_counter() - started
        for request_id, count in counts.items():
            times[request_id] += [now] * (len(engine.answers[request_id].token_ids) - count)
    wall = time.perf_counter() - started
    answers = [engine.answers[request_id] for request_id in ids]
    if failed := [answer.message for answer in answers if answer.finish_reason not in ("stop", "length")]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    tokens = [answer.token_ids for answer in answers]
    preemptions = engine.occupancy.preemptions - before
    return Run(asks, tokens, list(times.values()), list(engine.reports), preemptions, wall)


def measure(run: Run) -> dict[str, float]:
    """The numbers that are compared.

    `running` and the shares of the K/V slots are means over the time in which requests waited: then memory decides.
    `vain tokens` have been computed, but were not needed: computed again after a preemption, or for a request that had
    ended and was kept in its batch. Gaps are between the tokens of a request; where answers come whole there are none.
    """
    firsts = [times[0] for times in run.times]
    gaps = [b - a for times in run.times for a, b in itertools.pairwise(times)]
    needed = sum(len(ask.prompt_ids) + len(tokens) - 1 for ask, tokens in zip(run.asks, run.tokens, strict=True))
    full = [
        (b.started - a.started, a.occupancy, sum(event.finish_reason is not None for event in a.events))
        for a, b in itertools.pairwise(run.reports)
        if a.occupancy.waiting
    ] or [(1.0, run.reports[0].occupancy, 0)]
    seconds = sum(duration for duration, _, _ in full)
    numbers = {
        "requests/s": len(run.asks) / run.wall,
        "generated tokens/s": sum(map(len, run.tokens)) / run.wall,
        "first token p50 s": statistics.median(firsts),
        "first token p99 s": percentile(firsts, 99),
        "running": sum(d * (occupancy.running + ended) for d, occupancy, ended in full) / seconds,
        "K/V reserved": sum(d * occupancy.slots_reserved / occupancy.slots_total for d, occupancy, _ in full) / seconds,
        "K/V used": sum(d * occupancy.slots_used / occupancy.slots_total for d, occupancy, _ in full) / seconds,
        "preemptions": run.preemptions,
        "vain tokens": sum(report.num_tokens for report in run.reports) - needed,
        "schedule us": 1e6 * statistics.mean(report.schedule_seconds for report in run.reports),
    }
    if any(gaps):
        numbers |= {"gap p50 ms": 1e3 * statistics.median(gaps), "gap p99 ms": 1e3 * percentile(gaps, 99)}
    return numbers


def percentile(values: Iterable[float], percent: int) -> float:
    """By linear interpolation between the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def engine(arguments: argparse.Namespace, policy: str, **kv_cache: Any) -> EngineProcess:
    """An engine of this policy."""
    sizes = arguments.sizes
    scheduler: dict[str, Any] = {"policy": policy, "max_bs": sizes.max_bs}
    if POLICIES[policy].selection == "token_budget":
        scheduler["token_budget"] = sizes.token_budget
    settings: dict[str, Any] = {
        "model": str(arguments.model),
        "threads": arguments.threads,
        "scheduler": scheduler,
        "kv_cache": {"n_slots": sizes.slots, **kv_cache},
        "limits": {"max_model_len": sizes.long + sizes.limit},
    }
    if kv_cache:
        settings["limits"] = {}
    return EngineProcess(msgspec.convert(settings, EngineConfig))


def shared_prefix(arguments: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Seconds to the first token behind a system prompt that all share, one request after the other."""
    sizes, rng = arguments.sizes, random.Random(1)
    system = [rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(sizes.system_prompt)]
    questions = [[rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(sizes.question)] for _ in range(99)]
    slots = 2 * (sizes.system_prompt + sizes.question + 16)
    result: dict[str, Any] = {}
    answers = {}
    for cached in (False, True):
        with engine(arguments, "vllm", n_slots=slots, prefix_cache=cached) as process:
            runs = [run(process, [Ask(system + question, 4, seed=0)]) for question in questions[: sizes.followers + 1]]
            occupancy = process.occupancy
        name = "with" if cached else "without"
        result[f"{name} s"] = spread([one.times[0][0] for one in runs[1:]])
        answers[name] = [one.tokens for one in runs]
        if cached:
            result["hit rate"] = occupancy.prefix_hits / occupancy.prefix_queries
    result["times faster"] = result["without s"]["median"] / result["with s"]["median"]
    result["same tokens"] = answers["with"] == answers["without"]
    return result


def expectations(policies: dict[str, Any], prefix: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """What theory says of these policies, the ratio measured, and whether it came out so."""

    def ratio(metric: str, one: str, other: str) -> float:
        return policies[one][metric]["median"] / policies[other][metric]["median"]

    claims = []
    if policies.keys() >= {"orca", "peak"}:
        more = ratio("running", "peak", "orca")
        preempted = policies["peak"]["preemptions"]["max"]
        claims.append(("peak runs more requests than orca, and preempts none", more, more > 1 and not preempted))
    if policies.keys() >= {"orca", "sarathi"}:
        shorter = ratio("gap p99 ms", "orca", "sarathi")
        claims.append(("gap p99 of orca is several times that of sarathi", shorter, shorter > 2))
    if policies.keys() >= {"orca", "vllm"}:
        more = ratio("running", "vllm", "orca")
        claims.append(("vllm runs more requests than orca in the same memory", more, more > 1))
    faster = prefix["times faster"]
    claims.append(("the prefix cache cuts the time to the first token more than five times", faster, faster > 5))
    return claims


COLUMNS = (
    ("requests/s", ""),
    ("first token p50 s", ""),
    ("first token p99 s", ""),
    ("gap p99 ms", ""),
    ("running", ""),
    ("K/V reserved", "%"),
    ("K/V used", "%"),
    ("preemptions", ""),
    ("vain tokens", ""),
    ("schedule us", ""),
)


def show(result: dict[str, Any], console: Console) -> None:
    """The table, the shared prefix, and the expectations."""
    table = Table(title="medians over rounds; the same requests, the same engine, the same K/V memory")
    for column in ("policy", *(name for name, _ in COLUMNS), "same tokens"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column == "policy")
    for policy, numbers in result["policies"].items():
        medians = [(numbers[name]["median"], unit) if name in numbers else None for name, unit in COLUMNS]
        shown = [f"{entry[0]:.0%}" if entry and entry[1] else f"{entry[0]:.3g}" if entry else "" for entry in medians]
        table.add_row(policy, *shown, "yes" if numbers["same tokens"] else "no")
    console.print(table)
    prefix = result["shared prefix"]
    console.print(
        f"first token behind {result['sizes']['system_prompt']} shared tokens: {cell(prefix['without s'], 's')}, with "
        f"the prefix cache {cell(prefix['with s'], 's')}, hit rate {prefix['hit rate']:.0%}"
    )
    for entry in result["expectations"]:
        console.print(f"{'confirmed' if entry['confirmed'] else 'NOT SO'}: {entry['claim']}: {entry['value']:.2f}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars with the spread over rounds, one panel for each of the numbers that tell the policies apart."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = [name for name, _ in COLUMNS if name not in ("first token p99 s", "schedule us")]
    policies = result["policies"]
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(12, 5.6), layout="constrained", facecolor="white")
        for axes, name in zip(figure.subplots(2, 4).flat, panels, strict=True):
            for i, numbers in enumerate(policies.values()):
                if (value := numbers.get(name)) is not None:
                    spread_ = [[value["median"] - value["min"]], [value["max"] - value["median"]]]
                    axes.bar(i, value["median"], yerr=spread_, capsize=3, color="#0072b2" if i == 0 else "#bbbbbb")
                    axes.text(i, value["max"], f"{value['median']:.3g}", ha="center", va="bottom")
            axes.set_xticks(range(len(policies)), list(policies), rotation=40, ha="right")
            axes.set_title(name)
            axes.margins(y=0.12)
            axes.spines[["top", "right"]].set_visible(False)
        quick = " (QUICK: not a measurement)" if result["quick"] else ""
        where = f"{result['threads']} threads of {result['machine']['processor']}"
        figure.suptitle(f"{result['model']}, {where}, {result['date']}{quick}")
        figure.savefig(path, dpi=120)


def main() -> int:
    """Measure, show, write JSON and picture."""
    parser = argparse.ArgumentParser(prog="bench.policies", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="a tiny workload that only shows that everything works")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "policies.json")
    arguments = parser.parse_args()
    arguments.sizes = Sizes.quick() if arguments.quick else Sizes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = Console(width=None if sys.stdout.isatty() else 160)
    runs: dict[str, list[Run]] = {policy: [] for policy in arguments.policies}
    with console.status("what the requests generate") as status:
        with engine(arguments, "orca") as process:
            vocab_size = process.info.vocab_size
            free = make_asks(arguments.sizes, vocab_size)
            limited = [replace(ask, max_new_tokens=arguments.sizes.output[1]) for ask, _ in free]
            generated = run(process, limited).tokens
        asks = [with_stop_token(ask, tokens, length) for (ask, length), tokens in zip(free, generated, strict=True)]
        for number, policy in itertools.product(range(arguments.rounds), arguments.policies):
            if number == 0 or policy != SLOW:
                status.update(f"round {number + 1}: {policy}")
                with engine(arguments, policy) as process:
                    runs[policy].append(run(process, asks))
        status.update("a shared prefix")
        prefix = shared_prefix(arguments, vocab_size)
    reference = next(iter(runs.values()))[0].tokens
    policies: dict[str, Any] = {}
    for policy, of in runs.items():
        measured = [measure(one) for one in of]
        policies[policy] = {name: spread([numbers[name] for numbers in measured]) for name in measured[0]}
        policies[policy]["same tokens"] = all(one.tokens == reference for one in of)
    claims = expectations(policies, prefix)
    result = {
        "date": date.today().isoformat(),
        "command": "make bench-policies",
        "machine": machine(),
        "model": arguments.model.name,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "sizes": msgspec.to_builtins(arguments.sizes),
        "policies": policies,
        "shared prefix": prefix,
        "expectations": [{"claim": claim, "value": value, "confirmed": so} for claim, value, so in claims],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    draw(result, arguments.output.with_suffix(".png"))
    show(result, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
