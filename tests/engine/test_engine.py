"""The engine process with real models: exact tokens in any mixture of rows, failures of one, cancels, its end."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from bench.engine_process import Answer, EngineProcess
from orca_backend.channel import Shutdown, StartFailed
from orca_backend.config import EngineConfig, KVCacheConfig, SchedulerConfig
from orca_backend.engine.__main__ import StartError, count_slots, count_swap_slots
from orca_kernels.linear import dequantize_weight, quantize_weight


def config(
    checkpoint: Path, *, n_slots: int = 4096, max_bs: int = 16, n_workers: int = 1, kernels: str = "auto", **options
) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        dtype="float32",
        kernels=kernels,
        scheduler=SchedulerConfig(max_bs=max_bs, n_workers=n_workers, **options),
        kv_cache=KVCacheConfig(n_slots=n_slots),
    )


def submit_at_random_times(engine: EngineProcess, count: int, longest_prompt: int, most_tokens: int, seed: int) -> None:
    """Greedy requests of mixed lengths, some of which arrive while others are anywhere in their life."""
    generator = random.Random(seed)
    for _ in range(count):
        prompt = [generator.randrange(3, engine.info.vocab_size) for _ in range(generator.randint(1, longest_prompt))]
        engine.submit(prompt, generator.randint(1, most_tokens))
        for _ in range(generator.choice([0, 0, 0, 1, 3])):
            engine.receive()


def assert_greedy(model: transformers.PreTrainedModel, answers: list[Answer], generated: int) -> None:
    """Every answer is what `model` says alone: `generated` of them by its own generate(), all of them token by token.

    The token-by-token check feeds prompt and answer at once: if each answer token is the argmax after what stands
    before it, then the whole answer is the greedy one.
    """
    for answer in answers:
        prompt = answer.request.prompt_ids
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == answer.request.max_new_tokens
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
    for answer in answers[:generated]:
        prompt = torch.tensor([answer.request.prompt_ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=answer.request.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.token_ids == output[0, prompt.shape[1] :].tolist()


# The interpreter of the Triton language takes a second for an iteration.
@pytest.mark.parametrize(
    ("kernels", "n_workers", "requests"),
    [("torch", 1, 64), ("compiled", 1, 64), ("compiled", 3, 64), ("triton", 1, 12)],
)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_greedy_tokens_equal_transformers(family, kernels, n_workers, requests, request):
    checkpoint = request.getfixturevalue(family)
    options = {"n_slots": 1024, "max_bs": requests // 4, "n_workers": n_workers, "kernels": kernels}
    with EngineProcess(config(checkpoint, **options)) as engine:
        assert engine.info.kernels == kernels
        submit_at_random_times(engine, requests, min(40, 2 * requests), requests * 3 // 8, seed=n_workers)
        answers = engine.finish()
    assert len(answers) == requests
    mixed = [report for report in engine.reports if 0 < report.num_prefill_rows < report.num_rows]
    assert len(mixed) > requests // 12
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    assert_greedy(model, answers, generated=requests)


def test_tokens_with_compressed_weights_are_those_of_the_weights_that_they_stand_for(tiny_llama):
    options = {"n_slots": 256, "max_bs": 2, "kernels": "triton"}
    with EngineProcess(msgspec.structs.replace(config(tiny_llama, **options), quantization="int4_weight")) as engine:
        for prompt in ([5, 6, 7], [9] * 20, [11]):
            engine.submit(prompt, 4)
        answers = engine.finish()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    projections = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    for linear in projections:
        compressed = quantize_weight(linear.weight.data, "int4_weight")
        weight_bytes += compressed.num_bytes - linear.weight.nbytes
        linear.weight.data = dequantize_weight(compressed, torch.float32)
    assert (engine.info.quantization, engine.info.weight_bytes) == ("int4_weight", weight_bytes)
    assert len(projections) == 7 * 3
    assert_greedy(model, answers, generated=0)


def test_greedy_tokens_equal_transformers_on_smollm2(smollm2):
    with EngineProcess(config(smollm2)) as engine:
        submit_at_random_times(engine, 64, longest_prompt=48, most_tokens=24, seed=0)
        answers = engine.finish()
    assert sum(0 < report.num_prefill_rows < report.num_rows for report in engine.reports) > 5
    assert len(answers) == 64
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    assert_greedy(model, answers, generated=6)


def test_static_batching_gives_the_same_tokens(tiny_llama):
    answers = {}
    for policy in ("orca", "static_fair"):
        with EngineProcess(config(tiny_llama, max_bs=8, policy=policy)) as engine:
            submit_at_random_times(engine, 64, longest_prompt=40, most_tokens=24, seed=5)
            answers[policy] = [answer.token_ids for answer in engine.finish()]
    assert answers["orca"] == answers["static_fair"]


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_company(tiny_llama):
    sampled = {"temperature": 1.2, "top_p": 0.95, "frequency_penalty": 0.3, "seed": 11}
    with EngineProcess(config(tiny_llama)) as engine:
        engine.submit([5, 6, 7], 30, **sampled)
        engine.finish()
        for i in range(6):
            engine.submit([9] * (i + 1), 20, temperature=1.0, seed=i)
        again = engine.submit([5, 6, 7], 30, **sampled)
        other = engine.submit([5, 6, 7], 30, **{**sampled, "seed": 12})
        engine.finish()
    assert engine.answers[1].token_ids == engine.answers[again].token_ids != engine.answers[other].token_ids


def test_stop_tokens_end_a_sequence_but_not_before_min_tokens(tiny_llama):
    with EngineProcess(config(tiny_llama)) as engine:
        free = engine.submit([5, 6, 7], 12)
        engine.finish()
        tokens = engine.answers[free].token_ids
        stop = tokens[4]
        early = engine.submit([5, 6, 7], 12, stop_token_ids=[stop])
        late = engine.submit([5, 6, 7], 12, stop_token_ids=[stop], min_tokens=8)
        engine.finish()
    assert engine.answers[early].token_ids == tokens[: tokens.index(stop) + 1]
    assert engine.answers[early].finish_reason == "stop"
    assert stop not in engine.answers[late].token_ids[:8]


def test_a_bad_request_fails_alone(tiny_llama):
    with EngineProcess(config(tiny_llama, n_slots=64)) as engine:
        good = engine.submit([5, 6, 7], 5)
        outside = engine.submit([5, 10**6], 5)
        negative = engine.submit([-1], 5)
        too_long = engine.submit([5] * 60, 30)
        engine.finish()
        after = engine.submit([5, 6, 7], 5)
        engine.finish()
    for bad in (outside, negative, too_long):
        assert (engine.answers[bad].finish_reason, engine.answers[bad].code) == ("error", "INVALID_ARG")
    assert engine.answers[good].token_ids == engine.answers[after].token_ids
    assert len(engine.answers[good].token_ids) == 5


def test_500_requests_a_third_of_them_cancelled_leave_nothing(tiny_llama):
    generator = random.Random(3)
    with EngineProcess(config(tiny_llama, n_slots=512, n_workers=2)) as engine:
        doomed = set()
        for i in range(500):
            prompt = [generator.randrange(3, 99)] * generator.randint(1, 30)
            request_id = engine.submit(prompt, generator.randint(1, 20))
            if i % 3 == 0:
                doomed.add(request_id)
            for victim in [v for v in doomed if generator.random() < 0.3]:
                engine.cancel(victim)
                doomed.discard(victim)
            while engine.occupancy.waiting > 40:
                engine.receive()
        for victim in doomed:
            engine.cancel(victim)
        answers = engine.finish()
    reasons = [answer.finish_reason for answer in answers]
    assert set(reasons) == {"length", "cancelled"}
    assert reasons.count("cancelled") > 50
    assert (engine.occupancy.slots_reserved, engine.occupancy.slots_used) == (0, 0)


def test_shutdown_ends_the_process_cleanly(tiny_llama):
    with EngineProcess(config(tiny_llama)) as engine:
        engine.submit([5], 200)
        engine.channel.send(Shutdown())
        assert engine.process.wait(60) == 0


def test_the_engine_ends_when_its_parent_is_gone(tiny_llama):
    with EngineProcess(config(tiny_llama)) as engine:
        engine.submit([5], 200)
        started = time.monotonic()
        engine.channel.close()
        assert engine.process.wait(60) == 0
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache": KVCacheConfig(memory="1KiB")}, "kv_cache.memory"),
        ({"kv_cache": KVCacheConfig(n_slots=10**18)}, "kv_cache: 1000000000000000000 slots"),
        ({"model": "/does/not/exist"}, "does/not/exist"),
        ({"device": "cuda:7"}, "device: cuda:7 is not there"),
        ({"kernels": "torch", "deterministic": True}, "deterministic: true needs compiled or triton"),
        ({"kv_cache": KVCacheConfig(dtype="fp8")}, "kv_cache.dtype: fp8 needs triton"),
        ({"quantization": "fp8_weight"}, "quantization: fp8_weight needs triton kernels; here they are compiled"),
        ({"quantization": "int8", "kernels": "triton"}, "quantization: int8 needs compiled kernels"),
        ({"quantization": "int4_weight", "kernels": "torch"}, "int4_weight needs compiled or triton kernels"),
    ],
)
def test_what_cannot_start_says_why(tiny_llama, options, words):
    with EngineProcess(EngineConfig(**{"model": str(tiny_llama), "dtype": "float32", **options})) as engine:
        assert isinstance(engine.first_message, StartFailed)
        assert words.lower() in engine.first_message.message.lower()
        assert engine.process.wait(60) == 1


def test_memory_that_holds_no_block_is_refused_by_the_name_of_its_setting(tiny_llama):
    tiny = EngineConfig(model=str(tiny_llama), kv_cache=KVCacheConfig(n_slots=15))
    with pytest.raises(StartError, match=r"kv_cache\.n_slots: 15 is less than one block of 16"):
        count_slots(tiny, bytes_per_token=100)
    swapping = EngineConfig(
        model=str(tiny_llama),
        scheduler=SchedulerConfig(policy="vllm", preemption="swap"),
        kv_cache=KVCacheConfig(swap_memory=1599),
    )
    with pytest.raises(StartError, match=r"kv_cache\.swap_memory: 1599 bytes .* at least 1600"):
        count_swap_slots(swapping, bytes_per_token=100)
