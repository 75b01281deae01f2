"""`make gpu-check` without a GPU: its refusal, its arithmetic, its report, and its measuring on CPU tensors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import gpu_check, gpu_engine, gpu_floors
from bench.gpu_floors import GPT_13B, LLAMA_8B, Limits
from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.device import HostDevice
from orca_backend.engine.sequence_table import SequenceTable
from orca_kernels import dispatch

REPOSITORY = Path(__file__).resolve().parents[2]
LIMITS = Limits(bytes_per_second=4e12, operations_per_second=8e14)

# torch and triton are all that it may need: whatever else the product imports is not to be found.
BARE = """
import importlib.abc, sys, types
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"msgspec", "safetensors", "tokenizers", "rich", "yaml", "psutil", "tritonclient"}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
import bench.gpu_check, bench.gpu_kernels, orca_backend.engine.decode_graphs, orca_backend.engine.sequence_table
import orca_backend.models.decoder, orca_backend.engine.attention_kv
model = types.SimpleNamespace(notes={})
bench.gpu_check.check_engine(model, int, bool)
print(model.notes)
sys.argv = ["gpu_check"]
sys.exit(bench.gpu_check.main())
"""


def test_it_needs_only_torch_and_triton_and_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}
    result = subprocess.run([sys.executable, "-c", BARE], env=environment, capture_output=True, text=True, cwd="/")
    assert result.returncode == 2, result.stderr
    assert "finds no NVIDIA GPU" in result.stderr
    assert "left out: its scheduler needs msgspec" in result.stdout


def test_floors():
    # 40 layers of 12 h^2 (qkv, out, and 4 h up and down), and the head; two bytes each.
    weights = 2 * (40 * 12 * 5120**2 + 50257 * 5120)
    assert gpu_floors.step_weight_bytes(GPT_13B, 2) == weights
    assert gpu_floors.step_weight_bytes(LLAMA_8B, 2) == 2 * (
        32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    )
    work = gpu_floors.decode_work(GPT_13B, 8, 512, itemsize=2, kv_bytes_per_token=819200)
    assert work.bytes_read == weights + 8 * 512 * 819200
    assert work.operations == pytest.approx(8 * (weights + 4 * 40 * 5120 * 513))
    step = gpu_floors.entry("decode", 8, 512, 2 * work.bytes_read / 4e12, work, LIMITS)
    assert step["of the floor"] == pytest.approx(0.5)
    assert (step["bound by"], step["goal"], step["met"]) == ("memory", 0.85, False)
    assert gpu_floors.entry("decode", 64, 512, 1.0, work, LIMITS)["goal"] is None
    prompt = gpu_floors.prefill_work(GPT_13B, 2048, itemsize=2)
    step = gpu_floors.entry("prefill", 1, 2048, 1.25 * prompt.operations / 8e14, prompt, LIMITS)
    assert (step["bound by"], step["met"]) == ("matrix products", True)
    assert step["of the floor"] == pytest.approx(0.8)


def test_idle_time_between_kernels():
    share, gap = gpu_check.idle_of([(10, 20), (0, 10), (12, 15), (24, 30), (31, 40)])
    assert share == pytest.approx(5 / 40)
    assert gap == pytest.approx(2.5)


def test_every_kernel_is_checked_and_a_wrong_one_is_seen(monkeypatch):
    results = gpu_check.check_kernels(torch.device("cpu"), torch.float16, hidden=96)
    assert {r["name"]: r["error"] for r in results if not r["passed"]} == {}
    assert len(results) == 19
    monkeypatch.setattr("orca_kernels.gpu.activation.swiglu", lambda x: x[:, : x.shape[1] // 2] * 1.01)
    monkeypatch.setattr("bench.gpu_kernels._attention_checks", lambda *_: iter(()))
    monkeypatch.setattr("bench.gpu_kernels.gpu_linear.linear", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("bench.gpu_kernels.sampling_error", lambda _: 0.1)
    wrong = [
        r["name"] for r in gpu_check.check_kernels(torch.device("cpu"), torch.float16, hidden=32) if not r["passed"]
    ]
    assert len(wrong) == 10
    assert wrong[0] == "SwiGLU"
    assert wrong[-1].startswith("sampling")


def test_a_model_is_measured_and_reported():
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "head_dim": 64, "vocab_size": 300, "dtype": "float32"}
    spec = dataclasses.replace(LLAMA_8B, num_kv_heads=1, intermediate_size=48, **shape)

    def seconds(run, repeats):
        started = time.perf_counter()
        run()
        return [time.perf_counter() - started] * repeats

    dispatch.configure("triton")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_check, "REPEATS", 1)
            table = SequenceTable.num_bytes(2, 3, spec.vocab_size)
            device = HostDevice(table + 64 * AttentionKV.bytes_per_token(spec, torch.float32))
            model = gpu_check.ModelCheck(spec, device, torch.float32, LIMITS, seconds)
            run = model.decode(2, 20)
            assert run().tolist() == run().tolist()
            model.prefill(9)
            model.deterministic(2, 20)
            for name, value in {"BATCHES": (2,), "CONTEXTS": (20, 33), "PREFILL": 9, "TRACED": (2, 20)}.items():
                patch.setattr(gpu_check, name, value)
            patch.setattr(gpu_check, "idle_share", lambda run: (run().host, 0.0))
            patch.setattr(gpu_engine, "MAX_PASS_TOKENS", 40)  # fewer than the two prompts have
            gpu_check.check_engine(model, lambda: 0, lambda: True)
    finally:
        dispatch.configure()
    assert [(step["kind"], step["batch"], step["tokens"]) for step in model.steps] == [
        ("decode", 2, 20),
        ("prefill", 1, 9),
        ("engine prefill", 1, 9),
        ("engine decode", 2, 20),
        ("engine decode", 2, 33),
    ]
    assert [step.get("skipped") for step in model.steps[2:]] == [None, None, "left out: the K/V pool has 64 slots"]
    assert set(model.notes) == {"deterministic", "engine idle", "engine compiled while running"}
    assert all(0 < 1e-3 * step["host us"] <= step["ms"] for step in model.steps[2:4])
    model.steps.append({"kind": "decode", "batch": 64, "tokens": 2048, "skipped": "left out: no room"})
    text = gpu_floors.table(
        {
            "device": "a card",
            "limits": {"copy GB/s": 4000.0, "matrix TFLOP/s": 800.0},
            "kernels": [{"name": "SwiGLU", "error": 0.5, "passed": False}],
            "models": {"tiny": {"weights GB": 1.0, "steps": model.steps, "notes": model.notes}},
        }
    )
    assert "WRONG" in text
    assert "\ndecode, 2 x 20 tokens" in text
    assert "\nengine decode, 2 x 20 tokens" in text
    assert "MISSED" in text
    assert "left out: no room" in text
    assert "deterministic: " in text
