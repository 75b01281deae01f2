"""Figure 9 of the Orca paper: the engine by itself, the same batch run again and again until all of it has ended.

No scheduler, no server: iterations are made by hand. Prompts of 32 or 128 tokens, 32 generated, as there. Systems:

- "as served": the engine as the server runs it (compiled kernels on a CPU that has them): one flat batch, attention
  in one call for all rows.
- "selective": the plain torch operators, one flat batch, attention request by request (selective batching without the
  paper's fused attention kernel; on a GPU: with it).
- "padded": the same, but attention over the whole batch at once as one padded tensor, which needs equal lengths
  (FasterTransformer's way).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console

import orca_kernels
from loadtest import plots
from loadtest.measurement import REPOSITORY
from loadtest.report import Report, Row, spread, write_csv
from orca_backend.config import load_config
from orca_backend.engine.__main__ import load
from orca_backend.engine.worker import Runner
from orca_backend.models.spec import ModelSpec
from orca_backend.request import SamplerSettings
from orca_backend.scheduler.iteration import IterationBatch, JoiningSequence
from orca_backend.scheduler.iteration import Row as BatchRow
from orca_kernels import AttentionMetadata

BLOCK = 16
PROMPTS = (32, 128)
GENERATED = 32
BATCHES = (1, 2, 4, 8, 16, 32)
PREALLOCATED = 2048  # tokens that FasterTransformer sets aside for every request (paper, section 6.1)
SYSTEMS = {"as served": {"kernels": "auto"}, "selective": {"kernels": "torch"}, "padded": {"kernels": "torch"}}


def padded_attention(
    q_thd: torch.Tensor,
    k_cache_skd: torch.Tensor,
    v_cache_skd: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    k_scale_sk: torch.Tensor | None = None,
    v_scale_sk: torch.Tensor | None = None,
) -> torch.Tensor:
    """As orca_kernels.ragged_attention, for rows of equal lengths only: all of them in one tensor [rows, heads, ...].

    Raises ValueError for rows that differ, and for K/V kept in 8 bits.
    """
    if k_scale_sk is not None or v_scale_sk is not None:
        raise ValueError("padded attention reads no K/V in 8 bits")
    (length,), (start,) = set(metadata.query_lens), set(metadata.starts)
    slots = torch.stack([row.slots for row in metadata.rows])
    k, v = (cache[slots].transpose(1, 2) for cache in (k_cache_skd, v_cache_skd))  # [rows, k, tokens, d]
    q = q_thd.view(-1, length, *q_thd.shape[1:]).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=metadata.rows[0].mask, is_causal=length > 1 and not start, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(q_thd.shape)


@contextlib.contextmanager
def attention_of(system: str) -> Iterator[None]:
    """Let the plain torch model compute attention as `system` does."""
    if system == "padded":
        with mock.patch.object(orca_kernels, "ragged_attention", padded_attention):
            yield
    else:
        yield


def open_runner(model: Path, settings: Mapping[str, Any], tokens: int) -> Runner:
    """The engine's runner with a K/V pool of `tokens`; raises what the engine would report as its failure to start."""
    overrides = {**settings, "model": str(model), "kv_cache.n_slots": tokens, "kv_cache.block_size": BLOCK}
    _, runner, _ = load(load_config(REPOSITORY / "orca" / "1" / "engine.yaml", overrides, origin="--set"))
    return cast(Runner, runner)


def run_batch(runner: Runner, batch: int, prompt: int, generated: int, first_id: int) -> float:
    """Seconds for a batch of equal requests, from all prompts to the last token of all."""
    ids = range(first_id, first_id + batch)
    blocks = -(-(prompt + generated) // BLOCK)
    joining = [
        JoiningSequence(
            request_id=i,
            prompt_ids=list(range(1, prompt + 1)),
            block_ids=list(range(n * blocks, (n + 1) * blocks)),
            stop_token_ids=[],
            sampling=SamplerSettings(),
        )
        for n, i in enumerate(ids)
    ]
    started = time.perf_counter()
    tokens = [token for sequence in joining for token in sequence.prompt_ids]
    rows = [BatchRow(i, 0, prompt) for i in ids]
    result = runner.run(IterationBatch(iteration_id=0, rows=rows, token_ids=tokens, joining=joining))
    for step in range(generated - 1):
        rows = [BatchRow(i, prompt + step, 1) for i in ids]
        result = runner.run(IterationBatch(iteration_id=step + 1, rows=rows, token_ids=result.sampled))
    return time.perf_counter() - started


def figure9(
    model: Path, output: Path, console: Console, settings: Mapping[str, Any], repetitions: int, batches: tuple[int, ...]
) -> Path:
    """Measure, and write the report; its path. The first run of every batch only warms up."""
    tokens = max(batches) * -(-(max(PROMPTS) + GENERATED) // BLOCK) * BLOCK
    taken: dict[tuple[str, int, int], list[float]] = {}
    for system, own in SYSTEMS.items():
        runner = open_runner(model, {**settings, **own}, tokens)
        next_id = 1
        with attention_of(system):
            for prompt in PROMPTS:
                for batch in batches:
                    runs = []
                    for _ in range(repetitions + 1):
                        runs.append(run_batch(runner, batch, prompt, GENERATED, next_id))
                        next_id += batch
                    taken[system, prompt, batch] = runs[1:]
                    median = 1e3 * statistics.median(runs[1:])
                    console.print(f"{system}({prompt}), batch of {batch}: {median:.0f} ms", highlight=False)
        del runner
    report = Report(
        output,
        "Figure 9: the engine alone",
        f"The time for a batch of equal requests, {GENERATED} tokens generated each, no scheduler in between. The "
        "number in parentheses is the prompt length. In the paper Orca's engine is as fast as FasterTransformer or a "
        "little slower on one GPU (attention is not batched), and up to 47 % faster with pipelining off at 175B.",
        {"model": model.name, "settings": ", ".join(f"{k}={v}" for k, v in settings.items()) or "as in engine.yaml"},
    )
    with plots.style():
        figure, panels = plots.new_figure(len(PROMPTS), width=9.0)
        for panel, prompt in zip(panels, PROMPTS, strict=True):
            for system in SYSTEMS:
                times = [1e3 * statistics.median(taken[system, prompt, batch]) for batch in batches]
                panel.plot(batches, times, marker="o", markersize=4, label=f"{system}({prompt})")
            panel.set_xscale("log", base=2)
            panel.set_xticks(batches, map(str, batches))
            panel.set_xlabel("batch size (requests)")
            panel.set_ylabel("time for the batch (ms)")
            panel.set_ylim(bottom=0)
            panel.legend()
        report.add_figure("figure9", figure, "Time for a batch")
    rows: list[Row] = [
        {
            "prompt": prompt,
            "batch": batch,
            **{f"{system} (ms)": spread([1e3 * run for run in taken[system, prompt, batch]]) for system in SYSTEMS},
            "as served (ms/token)": f"{1e3 * statistics.median(taken['as served', prompt, batch]) / GENERATED:.3g}",
        }
        for prompt in PROMPTS
        for batch in batches
    ]
    write_csv(output / "figure9.csv", rows)
    report.add("In numbers", rows=rows)
    report.add("How many requests fit into a K/V pool", *_FEASIBILITY, rows=feasibility(ModelSpec.read(model)))
    return report.write()


_FEASIBILITY = (
    f"FasterTransformer sets {PREALLOCATED} tokens aside for every request and ran out of memory at batches of 8 (13B) "
    "and 16 (101B); Orca reserves what a request may need at most, here its prompt and what it generates.",
)


def feasibility(spec: ModelSpec) -> list[Row]:
    """Requests that fit, by the size of the pool, K and V in 2 bytes."""
    token_bytes = 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return [
        {
            "pool": f"{mib} MiB",
            "tokens": (slots := (mib << 20) // token_bytes),
            f"{PREALLOCATED} per request": slots // PREALLOCATED,
            **{f"{prompt} + {GENERATED} per request": slots // (prompt + GENERATED) for prompt in PROMPTS},
        }
        for mib in (64, 256, 1024, 4096)
    ]
