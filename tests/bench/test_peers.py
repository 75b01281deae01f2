"""The instrument of the comparison: equal work for all, honest numbers, real processes, and reports of what failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from safetensors import safe_open

from bench.peers import environments
from bench.peers.adapters.protocol import Answers
from bench.peers.compare import override
from bench.peers.environments import Environment, InstallError
from bench.peers.gguf_file import write_gguf
from bench.peers.metrics import HEADLINES, Outcome, WrongOutputError, agreement, check, measure
from bench.peers.system_process import SystemFailed, SystemProcess
from bench.peers.systems import SYSTEMS
from bench.peers.workload import Request, Sizes, Task, make_online_task, make_tasks
from orca_backend.models.import_model import smollm2_gguf
from orca_backend.serving.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"threads": 1, "max_running": 4, "max_tokens": 64, "dtype": "fp32", "weights": "none"}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def family(process: SystemProcess) -> list[psutil.Process]:
    parent = psutil.Process(process._process.pid)
    return [parent, *parent.children(recursive=True)]


def is_frozen(process: SystemProcess) -> bool:
    return {member.status() for member in family(process)} == {psutil.STATUS_STOPPED}


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_the_workload_is_the_same_every_time_and_within_its_bounds() -> None:
    sizes = Sizes()
    tasks = make_tasks(["workload", "decode", "prefill"], sizes, vocab_size=49152)
    assert tasks == make_tasks(["workload", "decode", "prefill"], sizes, vocab_size=49152)
    assert [task.name for task in tasks] == ["workload", "decode-1", "decode-8", "decode-32", "prefill"]
    requests = tasks[0].requests
    assert len(requests) == 64
    assert {32 <= len(r.prompt_ids) <= 512 and 1 <= r.max_new_tokens <= 128 for r in requests} == {True}
    assert max(len(r.prompt_ids) + r.max_new_tokens for task in tasks for r in task.requests) <= sizes.max_tokens
    # Leaving a task out changes nothing of the others.
    assert make_tasks(["prefill"], sizes, vocab_size=49152) == tasks[-1:]


def test_online_requests_are_texts_that_come_one_by_one(smollm2: Path) -> None:
    sizes = Sizes()
    task = make_online_task(sizes, smollm2)
    assert task == make_online_task(sizes, smollm2)
    encode = Tokenizer(smollm2).encode
    assert len(task.requests) == sizes.online_requests
    assert all(encode(r.prompt) == r.prompt_ids and 32 <= len(r.prompt_ids) <= 512 for r in task.requests)
    assert all(1 <= r.max_new_tokens <= 128 for r in task.requests)
    due = [r.at for r in task.requests]
    assert due[0] == 0.0
    assert due == sorted(due)
    assert due[-1] / (len(due) - 1) == pytest.approx(1 / sizes.online_rate, rel=0.25)


def test_requests_are_handed_out_once_when_they_are_due() -> None:
    soon, never = Request([1], 1, at=0.01), Request([1], 1, at=1e9)
    answers = Answers([Request([1], 1), soon, never])
    assert answers.due(wait=False)[0] == (0, answers.requests[0])
    while answers.until_next() == 0.0:
        answers.due(wait=False)
    assert 0 < (answers.until_next() or 0) <= 1e9
    everything = Answers([Request([1], 1), soon])
    handed_out = []
    while due := everything.due(wait=True):
        handed_out += due
    assert handed_out == [(0, everything.requests[0]), (1, soon)]
    assert everything.until_next() is None


def test_rates_by_hand() -> None:
    decode = Task("decode-2", "decode", [Request([1, 2], 3), Request([1, 2], 3)])
    # Both decode from 2.0 (the second's first token) to 4.0 (the first's last): 2 tokens of the first, 1 of the other.
    outcome = Outcome([[1, 2, 3], [4, 5, 6]], [[1.0, 3.0, 4.0], [2.0, 3.5, 5.0]], wall=6.0)
    assert measure(decode, outcome) == {"tokens/s": 3 / 2.0, "tokens/s with prefill": 1.0}
    prefill = Task("prefill", "prefill", [Request([1] * 30, 1), Request([1] * 50, 1)])
    assert measure(prefill, Outcome([[1], [1]], [[2.0], [4.0]], wall=4.5)) == {"tokens/s": 20.0}
    workload = Task("workload", "workload", [Request([1], 3), Request([1], 2)])
    metrics = measure(workload, Outcome([[1, 2, 3], [4, 5]], [[0.5, 1.5, 3.0], [1.0, 2.0]], wall=4.0))
    assert metrics["requests/s"] == 0.5
    assert metrics["generated tokens/s"] == 5 / 4
    assert metrics["first token p50 ms"] == 750.0
    assert metrics["gap p50 ms"] == 1000.0
    assert metrics["normalized latency p50 ms"] == 1000.0
    # Online, time counts from when a request was due, and what comes together is one event.
    late = [Request([1], 3, at=0.25), Request([1], 2, at=0.75)]
    online = Task("online", "online", late)
    metrics = measure(online, Outcome([[None] * 3, [None] * 2], [[0.5, 1.5, 1.5], [1.25, 2.75]], wall=4.0))
    assert metrics["first token p50 ms"] == 375.0
    assert metrics["gap p50 ms"] == 1250.0
    assert metrics["normalized latency p50 ms"] == pytest.approx(1e3 * (1.25 / 3 + 1.0) / 2)
    assert set(HEADLINES["online"]) <= set(metrics)


def test_work_that_was_not_done_is_no_result() -> None:
    task = Task("decode-1", "decode", [Request([1], 3)])
    check(task, Outcome([[7, 8, 9]], [[0.1, 0.2, 0.3]], wall=0.3))
    with pytest.raises(WrongOutputError, match="asked for 3 tokens and got 2"):
        check(task, Outcome([[7, 8]], [[0.1, 0.2]], wall=0.3))
    pair = Task("decode-2", "decode", [Request([1], 2), Request([1], 2)])
    with pytest.raises(WrongOutputError, match="at no time"):
        measure(pair, Outcome([[1, 2], [3, 4]], [[0.1, 0.2], [0.3, 0.4]], wall=0.4))


def test_agreement() -> None:
    reference = Outcome([[1, 2, 3, 4], [5, 6]], [[], []], wall=1.0)
    other = Outcome([[1, 2, 9, 4], [5, 6]], [[], []], wall=1.0)
    assert agreement(other, reference) == {"equal": 1, "of": 2, "mean equal prefix": 0.75}


def test_settings_reach_only_the_system_they_name() -> None:
    options = {"threads": 2}
    settings = ["openvino.scheduler.max_num_batched_tokens=512", "ours.threads=1"]
    assert override(options, "openvino", settings) == {"threads": 2, "scheduler": {"max_num_batched_tokens": 512}}
    assert override(options, "ours", settings) == {"threads": 1}
    assert options == {"threads": 2}


def test_our_engine_does_exactly_what_is_asked_and_is_frozen_in_between(smollm2: Path) -> None:
    requests = [Request(list(range(100, 100 + n)), n) for n in (5, 1, 7, 3, 2, 6)]
    task = Task("workload", "workload", requests)
    with SystemProcess("ours-test", SYSTEMS["ours"], threads=1) as process:
        loaded = process.load(smollm2, OPTIONS)
        assert loaded["info"]["dtype"] == "float32"
        assert len(family(process)) == 2
        wait_until(lambda: is_frozen(process), "waits without being frozen")
        outcomes = [process.run(requests) for _ in range(2)]
        for outcome in outcomes:
            check(task, outcome)
            assert all(times == sorted(times) for times in outcome.times)
            assert max(times[-1] for times in outcome.times) <= outcome.wall
            # Four may run: the fifth begins when one has ended, so not with the first.
            assert outcome.times[4][0] > outcome.times[0][0]
        assert outcomes[0].token_ids == outcomes[1].token_ids
        assert process.peak_memory() > loaded["info"]["weight_bytes"]
        wait_until(lambda: is_frozen(process), "waits without being frozen")
        members = family(process)
    wait_until(lambda: all(map(is_gone, members)), "a process was left behind")


@pytest.mark.slow
def test_our_server_answers_when_requests_are_due_and_is_frozen_in_between(smollm2: Path) -> None:
    task = make_online_task(replace(Sizes.quick(), online_requests=3), smollm2)
    with SystemProcess("served-test", SYSTEMS["ours-served"], threads=1) as process:
        process.load(smollm2, OPTIONS)
        wait_until(lambda: is_frozen(process), "waits without being frozen")
        assert len(family(process)) >= 4  # adapter, tritonserver, stub, engine
        for _ in range(2):  # again, after it was frozen
            outcome = process.run(task.requests)
            check(task, outcome)
            assert all(times[0] > request.at for request, times in zip(task.requests, outcome.times, strict=True))
        members = family(process)
    wait_until(lambda: all(map(is_gone, members)), "a process was left behind")


def test_failures_carry_the_reason_and_dead_systems_are_noticed(tmp_path: Path) -> None:
    with SystemProcess("ours-test", SYSTEMS["ours"], threads=1) as process:
        with pytest.raises(SystemFailed, match="StartFailed"):
            process.load(tmp_path / "no-model", OPTIONS)
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(SystemFailed, match="died or hung"):
            process.run([Request([1], 1)])


def test_an_environment_is_made_once_and_again_for_other_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = tmp_path / "empty.txt"
    pins.write_text("# nothing\n")
    monkeypatch.setattr(environments, "RUN", tmp_path)
    monkeypatch.setattr(Environment, "pins", property(lambda self: pins))
    environment = Environment("empty")
    environment.install()
    made = environment.python.stat().st_ctime_ns
    environment.install()
    assert environment.python.stat().st_ctime_ns == made
    pins.write_text("./no-such-package\n")
    with pytest.raises(InstallError, match=r"no-such-package.*empty-install\.log"):
        environment.install()


@pytest.mark.slow
def test_gguf_holds_the_weights_of_the_checkpoint(smollm2: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    write_gguf(smollm2, smollm2_gguf(), "bf16", target)
    template, written = gguf.GGUFReader(smollm2_gguf()), gguf.GGUFReader(target)
    assert {t.name: list(t.shape) for t in written.tensors} == {t.name: list(t.shape) for t in template.tensors}
    assert written.fields["tokenizer.ggml.merges"].contents() == template.fields["tokenizer.ggml.merges"].contents()
    # The checkpoint was imported from the template, so rounding its tensors to bfloat16 gives the ones just written,
    # the order of the query rows included.
    originals = {t.name: t for t in template.tensors}
    for name in ("blk.3.attn_q.weight", "blk.3.attn_k.weight", "blk.7.ffn_down.weight", "token_embd.weight"):
        tensor = next(t for t in written.tensors if t.name == name)
        assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
        expected = gguf.quantize(gguf.dequantize(originals[name].data, originals[name].tensor_type), tensor.tensor_type)
        np.testing.assert_array_equal(tensor.data, expected)
    norm = next(t for t in written.tensors if t.name == "blk.0.attn_norm.weight")
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        expected = weights.get_tensor("model.layers.0.input_layernorm.weight").float().numpy()
    np.testing.assert_array_equal(norm.data, expected)


def test_the_command_writes_results_and_says_what_could_not_be_measured(smollm2: Path, tmp_path: Path) -> None:
    output = tmp_path / "peers.json"
    command = [sys.executable, "-m", "bench.peers.compare", "--quick", "--rounds", "1", "--tasks", "decode"]
    command += ["--peers", "ours", "--threads", "1", "--model", str(smollm2), "--output", str(output)]
    failing = [*command, "--set", "ours.engine.no_such_field=1"]
    done = subprocess.run(failing, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "no_such_field" in json.loads(output.read_text())["systems"]["ours"]["failed"]
    assert "no_such_field" in done.stdout
    assert not output.with_suffix(".png").exists()


def test_adapters_offer_every_system_and_pins_are_exact() -> None:
    for system in SYSTEMS.values():
        assert (ROOT / "bench" / "peers" / "adapters" / system.adapter).is_file()
        if system.environment:
            lines = [line for line in system.environment.pins.read_text().splitlines() if not line.startswith("#")]
            assert lines
            assert all(line.count("==") == 1 for line in lines), system.environment.pins
