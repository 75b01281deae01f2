"""The rate of this machine's bf16 matrix products, as the ceiling of prefill: oneDNN, weights packed once, 512 rows.

Run as a script with a checkpoint directory and a number of threads; prints one JSON line. Every product of every layer
is done once per pass with weights of its own, so that they come from memory as in a forward pass.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch


def layer_shapes(config: dict) -> list[tuple[int, int]]:
    """[in, out] of the products of one layer: query, key and value in one; output; gate and up in one; down."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    return [(hidden, (heads + 2 * kv_heads) * head), (heads * head, hidden), (hidden, 2 * inner), (inner, hidden)]


def measure(config: dict, rows: int = 512, passes: int = 10) -> dict[str, float]:
    """TFLOP/s, and the tokens per second of a model that did nothing but these products; the best of `passes`."""
    shapes = layer_shapes(config) * config["num_hidden_layers"]
    pack = torch.ops.mkldnn._reorder_linear_weight
    weights = [pack(torch.randn(n, k).to(torch.bfloat16), rows) for k, n in shapes]
    inputs = {k: torch.randn(rows, k).to(torch.bfloat16) for k, _ in shapes}

    def one_pass() -> float:
        started = time.perf_counter()
        for (k, _), weight in zip(shapes, weights, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[k], weight, None, "none", [], "")
        return time.perf_counter() - started

    one_pass()
    seconds = min(one_pass() for _ in range(passes))
    operations = sum(2 * rows * k * n for k, n in shapes)
    return {"tflops": operations / seconds / 1e12, "tokens/s": rows / seconds}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(measure(json.loads((Path(sys.argv[1]) / "config.json").read_text()))))
