"""What a step of a model must move and compute on a GPU, how near a measured time comes to that, and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.work import Work, row_work
from orca_backend.models.spec import ModelSpec, RopeSpec

GOALS = {"decode": 0.85, "prefill": 0.60}  # shares of the floor; decode up to a batch of 32
GOAL_BATCH = 32

GPT_13B = ModelSpec(
    architecture="GPT2LMHeadModel", dtype="bfloat16", vocab_size=50257, hidden_size=5120, num_layers=40, num_heads=40,
    num_kv_heads=40, head_dim=128, intermediate_size=20480, max_positions=2048 + 64, norm="layer", norm_eps=1e-5,
    activation="gelu_tanh", rope=None, qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=True,
    eos_token_ids=(),
)  # fmt: skip
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM", dtype="bfloat16", vocab_size=128256, hidden_size=4096, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336, max_positions=8192, norm="rms", norm_eps=1e-5,
    activation="swiglu", rope=RopeSpec(kind="default", theta=500000.0), qkv_bias=False, out_bias=False, mlp_bias=False,
    tie_embeddings=False, eos_token_ids=(),
)  # fmt: skip
SHAPES = {"GPT 13B (the paper's)": GPT_13B, "Llama 8B": LLAMA_8B}


@dataclass(frozen=True)
class Limits:
    """Of a card: bytes per second (read or written) of a large copy, and operations per second of matrix products."""

    bytes_per_second: float
    operations_per_second: float


def step_weight_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of weights that every step reads: all but the table of embeddings, of which it reads a few rows."""
    one_token = row_work(spec, 0, 1, sampled=1, kv_bytes_per_token=0).operations / 2
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim
    return int(one_token - attention) * itemsize


def decode_work(spec: ModelSpec, batch: int, context: int, *, itemsize: int, kv_bytes_per_token: int) -> Work:
    """One token of each of `batch` sequences that have `context` tokens in the cache."""
    row = row_work(spec, context, 1, sampled=1, kv_bytes_per_token=kv_bytes_per_token)
    weights = Work(bytes_read=step_weight_bytes(spec, itemsize))
    return sum((row for _ in range(batch)), start=weights)


def prefill_work(spec: ModelSpec, tokens: int, *, itemsize: int) -> Work:
    """A whole prompt, one token of which is sampled."""
    weights = Work(bytes_read=step_weight_bytes(spec, itemsize))
    return weights + row_work(spec, 0, tokens, sampled=1, kv_bytes_per_token=0)


def entry(
    kind: str, batch: int, tokens: int, seconds: float, work: Work, limits: Limits, **more: Any
) -> dict[str, Any]:
    """A line of the report; `kind` ends with "decode" or "prefill".

    `floor`: the larger of the least times for the bytes and for the operations.
    """
    memory = work.bytes_read / limits.bytes_per_second
    matrix = work.operations / limits.operations_per_second
    share = max(memory, matrix) / seconds
    phase = kind.split()[-1]
    goal = GOALS[phase] if phase == "prefill" or batch <= GOAL_BATCH else None
    return {
        "kind": kind,
        "batch": batch,
        "tokens": tokens,
        "ms": 1e3 * seconds,
        "GB/s": work.bytes_read / seconds / 1e9,
        "TFLOP/s": work.operations / seconds / 1e12,
        "bound by": "memory" if memory > matrix else "matrix products",
        "of the floor": share,
        "goal": goal,
        "met": None if goal is None else share >= goal,
        **more,
    }


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    limits = report["limits"]
    lines = [
        f"{report['device']}: {limits['copy GB/s']:.0f} GB/s copying, {limits['matrix TFLOP/s']:.0f} TFLOP/s in bf16",
        "",
        f"{'kernel':44} {'RMS ratio':>10}",
    ]
    lines += [
        f"{check['name']:44} {check['error']:10.2e}{'' if check['passed'] else '   WRONG'}"
        for check in report["kernels"]
    ]
    header = (
        f"{'step':32} {'ms':>8} {'GB/s':>7} {'TFLOP/s':>8} {'of the floor':>12} {'goal':>5} {'host us':>8}  bound by"
    )
    for name, model in report["models"].items():
        lines += ["", f"{name}: {model['weights GB']:.1f} GB of weights", header]
        for step in model["steps"]:
            what = f"{step['kind']}, {step['batch']} x {step['tokens']} tokens"
            if "skipped" in step:
                lines.append(f"{what:32} {step['skipped']}")
                continue
            goal = "-" if step["goal"] is None else f"{step['goal']:.0%}"
            host = f"{step['host us']:8.0f}" if "host us" in step else f"{'-':>8}"
            lines.append(
                f"{what:32} {step['ms']:8.3f} {step['GB/s']:7.0f} {step['TFLOP/s']:8.1f} {step['of the floor']:12.0%} "
                f"{goal:>5} {host}  {step['bound by']}{'   MISSED' if step['met'] is False else ''}"
            )
        lines += [f"{key}: {value}" for key, value in model["notes"].items()]
    return "\n".join(lines)
