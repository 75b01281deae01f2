"""What precision costs: perplexity, log-probability error and greedy agreement of every kind of weights and K/V.

`make bench-quality` writes bench/results/quality.json and, from nothing but that, docs/numerics.md. Nothing here is a
time, so it may run on a busy machine. Exit code 1 if the perplexity of int8 is too far from that of bf16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress

from bench.engine_process import EngineProcess
from bench.model import open_model
from bench.numerics import render
from bench.peers.environments import ROOT
from loadtest.machine import machine
from orca_backend.config import EngineConfig
from orca_backend.serving.tokenizer import Tokenizer
from orca_kernels import cpu

INT8_LIMIT = 0.01  # by which its perplexity may differ from that of bf16
SPECIFICATION = "fp32, plain torch"
BFLOAT16 = "bf16, compiled"
INT8_KV = "int8 K/V"


@dataclass(frozen=True)
class Text:
    """A text that is the same everywhere: a file of the repository, or of a package at its pinned version."""

    kind: str
    path: str
    package: str | None = None

    @property
    def source(self) -> str:
        """Where it is, for people."""
        return f"{self.path} of {self.package} {_version(self.package)}" if self.package else self.path

    def read(self) -> str:
        """The text."""
        path = distribution(self.package).locate_file(self.path) if self.package else ROOT / self.path
        return Path(str(path)).read_text(encoding="utf-8")


def _version(package: str) -> str:
    """The pinned version, whatever processor it was built for."""
    return distribution(package).version.partition("+")[0]


TEXTS = (
    Text("licence", "LICENSE"),
    Text("prose", "numpy/ma/README.rst", "numpy"),
    Text("manual", "tqdm-4.70.1.dist-info/METADATA", "tqdm"),
    Text("mathematics", "mpmath/calculus/quadrature.py", "mpmath"),
    Text("Python", "rich/table.py", "rich"),
    Text("C++", "torch/include/c10/util/SmallVector.h", "torch"),
    Text("eight languages", "bench/texts/languages.txt"),
)


def variants(model: str, threads: int) -> dict[str, dict[str, Any]]:
    """Name to settings of the engine: both precisions on both paths, every quantization of theirs, int8 K/V."""
    found: dict[str, dict[str, Any]] = {
        SPECIFICATION: {"dtype": "float32", "kernels": "torch"},
        "fp32, compiled": {"dtype": "float32", "kernels": "compiled"},
        "bf16, plain torch": {"dtype": "bfloat16", "kernels": "torch"},
        BFLOAT16: {"dtype": "bfloat16", "kernels": "compiled"},
    }
    for quantization in cpu.Quantization:
        if (name := quantization.value) != "none":
            found[name] = {"dtype": "bfloat16", "kernels": "compiled", "quantization": name}
    found[INT8_KV] = found[BFLOAT16] | {"kv_cache": {"dtype": "int8"}}
    found[f"int8, {INT8_KV}"] = found["int8"] | {"kv_cache": {"dtype": "int8"}}
    return {name: {"model": model, "threads": threads, **settings} for name, settings in found.items()}


def with_slots(config: dict[str, Any], slots: int) -> dict[str, Any]:
    """The same settings with a K/V pool of that size."""
    return {**config, "kv_cache": {**config.get("kv_cache", {}), "n_slots": slots}}


@dataclass(frozen=True)
class Likelihoods:
    """One variant on one chunk, against the specification at equal prefixes; all [tokens - 1].

    `loss` is the negative log-probability of the token that comes, `error` its difference from the specification's,
    `divergence` the Kullback-Leibler divergence of the variant's distribution from the specification's, in nats;
    `same_best` says whether both think the same token most likely.
    """

    loss: torch.Tensor
    error: torch.Tensor
    divergence: torch.Tensor
    same_best: torch.Tensor

    @classmethod
    def of(cls, log_probs_tv: torch.Tensor, reference_tv: torch.Tensor, token_ids: list[int]) -> Likelihoods:
        """From log-probabilities after every token, [tokens, vocabulary]."""
        following = torch.tensor(token_ids[1:])[:, None]
        ours, theirs = log_probs_tv[:-1], reference_tv[:-1]
        loss = -ours.gather(1, following)[:, 0]
        return cls(
            loss=loss,
            error=(loss + theirs.gather(1, following)[:, 0]).abs(),
            divergence=torch.nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(1),
            same_best=ours.argmax(1) == theirs.argmax(1),
        )


def chunks(token_ids: list[int], size: int) -> Iterator[list[int]]:
    """`token_ids` in pieces of at most `size`, the last one shorter, none shorter than two."""
    for first in range(0, len(token_ids) - 1, size):
        yield token_ids[first : first + size]


def measure_likelihoods(
    settings: dict[str, dict[str, Any]], texts: dict[str, list[int]], chunk: int, progress: Progress
) -> dict[str, dict[str, list[Likelihoods]]]:
    """Variant to kind of text to one entry per chunk. Every chunk begins without context."""
    models = {}
    for name, config in progress.track(settings.items(), description="loading"):
        models[name] = open_model(**with_slots(config, chunk + 16))
    found: dict[str, dict[str, list[Likelihoods]]] = {name: {kind: [] for kind in texts} for name in models}
    work = [(kind, piece) for kind, ids in texts.items() for piece in chunks(ids, chunk)]
    for kind, piece in progress.track(work, description="likelihoods"):
        reference = models[SPECIFICATION].logits(piece).log_softmax(1)
        for name, model in models.items():
            log_probs = reference if name == SPECIFICATION else model.logits(piece).log_softmax(1)
            found[name][kind].append(Likelihoods.of(log_probs, reference, piece))
    return found


def likelihood_table(of: dict[str, list[Likelihoods]]) -> dict[str, Any]:
    """The numbers of one variant over all texts."""
    every = [entry for entries in of.values() for entry in entries]
    error = torch.cat([entry.error for entry in every])
    return {
        "perplexity": _perplexity(every),
        "by text": {kind: _perplexity(entries) for kind, entries in of.items()},
        "log-probability error": {
            "mean": error.mean().item(),
            "p99": error.quantile(0.99).item(),
            "max": error.max().item(),
        },
        "divergence": torch.cat([entry.divergence for entry in every]).mean().item(),
        "same most likely token": torch.cat([entry.same_best for entry in every]).float().mean().item(),
    }


def _perplexity(entries: list[Likelihoods]) -> float:
    return math.exp(torch.cat([entry.loss for entry in entries]).double().mean().item())


def generate(config: dict[str, Any], prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy answers of a real engine process, all prompts in one batch; ends of sequence are ignored."""
    slots = sum(-(-(len(prompt) + length) // 16) * 16 for prompt in prompts)
    settings = with_slots(config, slots) | {"scheduler": {"max_bs": len(prompts)}}
    with EngineProcess(msgspec.convert(settings, EngineConfig)) as engine:
        for prompt in prompts:
            engine.submit(prompt, length)
        return [answer.token_ids for answer in engine.finish(timeout=1200)]


def agreement(answers: list[list[int]], reference: list[list[int]]) -> dict[str, float]:
    """How alike two lists of equally long answers are; `until first difference` in tokens, the median answer's."""
    pairs = list(zip(answers, reference, strict=True))
    equal = [[a == b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in pairs]
    return {
        "equal tokens": statistics.mean(statistics.mean(map(float, row)) for row in equal),
        "equal answers": sum(all(row) for row in equal),
        "until first difference": statistics.median(row.index(False) if not all(row) else len(row) for row in equal),
    }


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything; the content of quality.json."""
    tokenizer = Tokenizer(arguments.model)
    settings = variants(str(arguments.model), arguments.threads)
    torch.set_num_threads(arguments.threads)
    sources, texts = [], {}
    for text in TEXTS:
        content = text.read()
        texts[text.kind] = tokenizer.encode(content)[: arguments.tokens]
        digest = hashlib.sha256(content.encode()).hexdigest()
        sources.append({"kind": text.kind, "source": text.source, "tokens": len(texts[text.kind]), "sha256": digest})
    with Progress(console=console, transient=True) as progress:
        likelihoods = measure_likelihoods(settings, texts, arguments.chunk, progress)
        prompts = [
            ids[first : first + arguments.prompt]
            for ids in texts.values()
            for first in range(0, arguments.prompt * arguments.prompts, arguments.prompt)
        ]
        answers = {}
        for name, config in progress.track(settings.items(), description="greedy answers"):
            answers[name] = generate(config, prompts, arguments.output_tokens)
    return {
        "date": date.today().isoformat(),
        "command": "make bench-quality",
        "machine": machine(),
        "model": arguments.model.name,
        "threads": arguments.threads,
        "texts": sources,
        "chunk": arguments.chunk,
        "greedy": {"answers": len(prompts), "prompt tokens": arguments.prompt, "tokens": arguments.output_tokens},
        "specification": SPECIFICATION,
        "bf16": BFLOAT16,
        "variants": {
            name: likelihood_table(likelihoods[name])
            | {
                "agreement with the specification": agreement(answers[name], answers[SPECIFICATION]),
                "agreement with bf16": agreement(answers[name], answers[BFLOAT16]),
            }
            for name in settings
        },
    }


def main() -> int:
    """Measure, write, show."""
    parser = argparse.ArgumentParser(prog="bench.quality", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=1200, help="of each text")
    parser.add_argument("--chunk", type=int, default=1200, help="tokens that are judged together")
    parser.add_argument("--prompts", type=int, default=4, help="of each text, for greedy answers")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="of a greedy answer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "quality.json")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "numerics.md")
    parser.add_argument("--render", action="store_true", help="only write the document anew from the results")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not arguments.render:
        result = run(arguments, console)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    result = json.loads(arguments.results.read_text())
    document = render(result)
    arguments.document.parent.mkdir(parents=True, exist_ok=True)
    arguments.document.write_text(document)
    console.print(document, markup=False, highlight=False)
    perplexity = {name: numbers["perplexity"] for name, numbers in result["variants"].items()}
    return int(abs(perplexity["int8"] / perplexity[BFLOAT16] - 1) > INT8_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
