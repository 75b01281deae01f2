"""The engine against the machine: the arithmetic of floors by hand, and the real model driven step by step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.driver import Driver
from bench.engine import OUTSIDE, workload_work
from bench.model import open_model
from bench.peers.workload import Request, Task
from bench.work import Work, row_work
from orca_backend.models.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]


def test_operations_are_two_for_every_weight_and_token(smollm2: Path) -> None:
    spec = ModelSpec.read(smollm2)
    weights = 134_515_008 - 61 * 576  # all parameters of SmolLM2-135M (the head is the embedding) but the norms
    head = 49152 * 576
    one = row_work(spec, 0, 1, sampled=1, kv_bytes_per_token=100)
    assert one == Work(2 * weights + 4 * 30 * 9 * 64, 0)  # one token sees itself
    last = row_work(spec, 7, 3, sampled=0, kv_bytes_per_token=100)
    assert last == Work(2 * 3 * (weights - head) + 4 * 30 * 9 * 64 * (8 + 9 + 10), 700)
    # A sequence token by token is as much work as in one row.
    task = Task("workload", "workload", [Request([1] * 5, 3)])
    rows = [(0, 5), (5, 1), (6, 1)]
    steps = sum((row_work(spec, *row, sampled=1, kv_bytes_per_token=0) for row in rows), Work())
    assert workload_work(spec, task) == steps


def test_floors_by_hand() -> None:
    floors = Work(operations=3e11, bytes_read=5e9).seconds({"read GB/s": 20.0, "tflops": 0.4})
    assert floors == {"memory": pytest.approx(0.25), "matrix": pytest.approx(0.75)}


def test_the_driver_decodes_what_transformers_decodes(tiny_llama: Path, tiny_llama_source: Path) -> None:
    from transformers import LlamaForCausalLM

    prompts = [[3 + (7 * i * j + j) % 250 for j in range(12 + i)] for i in range(3)]
    reference = LlamaForCausalLM.from_pretrained(tiny_llama_source)
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0].tolist()
        for prompt in prompts
    ]
    model = open_model(model=str(tiny_llama), dtype="float32", kernels="compiled", threads=1)
    driver = Driver(model, ModelSpec.read(tiny_llama))
    batches = []
    run = model.runner.run
    model.runner.run = lambda batch: batches.append(batch) or run(batch)  # type: ignore[method-assign]
    measured = driver.decode([Request(prompt, 6) for prompt in prompts])
    assert (measured.tokens, measured.iterations) == (18, 6)
    fed = zip(*(batch.token_ids for batch in batches[3:]), strict=True)
    assert [prompt + list(tokens) for prompt, tokens in zip(prompts, fed, strict=True)] == expected
    assert 0 < sum(measured.operations.values()) < measured.seconds
    spec = ModelSpec.read(tiny_llama)
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * 16 * 4  # head dim 8, padded to 16
    cached = sum(len(prompt) + step for prompt in prompts for step in range(6))
    assert measured.work.bytes_read == 6 * model.info.weight_bytes + cached * kv_bytes


@pytest.mark.slow
def test_the_command_measures_every_kind_of_weights_on_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    output = tmp_path / "engine.json"
    command = [sys.executable, "-m", "bench.engine", "--quick", "--rounds", "1", "--threads", "1"]
    command += ["--weights", "bf16", "int8", "--model", str(smollm2), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    bf16, int8 = result["variants"]["bf16"], result["variants"]["int8"]
    # All weights in two bytes; in one, and a scale for 64 of them.
    assert bf16["weight MB"] == pytest.approx(2 * 134.515, rel=0.01)
    assert int8["weight MB"] == pytest.approx(134.515 * (1 + 4 / 64), rel=0.01)
    for variant in (bf16, int8):
        assert set(variant["tasks"]) == {"workload", "decode-1", "decode-4", "prefill"}
        for name, task in variant["tasks"].items():
            assert task["of the matrix floor"]["median"] > 0
            if name != "workload":
                assert task["of the memory floor"]["median"] > 0
                times = task["operations, ms per iteration"]
                assert {"attention", "linear 576x3072", OUTSIDE} < set(times)
                assert sum(times.values()) == pytest.approx(task["ms per iteration"]["median"], rel=0.01)
