"""What /metrics says is what was sent."""

from __future__ import annotations

import itertools
import time

import pytest
from wire import RawCall, metric, metrics, post, wait_until, wait_until_idle

from orca_backend.server.triton_server import TritonServer
from orca_client import OrcaClient, TextDelta

FAMILIES = {
    "orca_requests_running",
    "orca_requests_waiting",
    "orca_kv_slots",
    "orca_iterations_total",
    "orca_iteration_batch_size_bucket",
    "orca_iteration_tokens_bucket",
    "orca_failures_total",
    "orca_finished_total",
    "orca_engine_restarts_total",
    "orca_engine_heartbeat_age_seconds",
    "orca_preemptions_total",
    "orca_expired_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "nv_trt_llm_request_metrics",
    "nv_trt_llm_kv_cache_block_metrics",
}
SETTLED = 1.2  # seconds after which all that has happened is published


def totals(server: TritonServer) -> dict[str, float]:
    """Every counter and every sum and count of a histogram of the model `orca`, by name and own label."""
    values = {}
    for name, samples in metrics(server).items():
        for labels, value in samples:
            if labels["model"] == "orca" and name.endswith(("_total", "_sum", "_count")):
                values[" ".join([name, *(labels[key] for key in ("reason", "kind") if key in labels)])] = value
    return values


def test_families_and_labels(smol: TritonServer) -> None:
    published = metrics(smol)
    assert published.keys() >= FAMILIES
    for name in FAMILIES:
        for model, policy in (("orca", "orca"), ("static_baseline", "static_fair")):
            own = [labels for labels, _ in published[name] if labels["model"] == model]
            assert own, f"{name} of {model}"
            assert {(labels["version"], labels["policy"]) for labels in own} == {("1", policy)}
    slots = metric(smol, "orca_kv_slots", state="total")
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert (
        metric(smol, blocks, kv_cache_block_type="max") * metric(smol, blocks, kv_cache_block_type="tokens_per")
        == slots
    )
    for model in ("orca", "static_baseline"):
        wait_until(lambda model=model: 0 <= metric(smol, "orca_engine_heartbeat_age_seconds", model) < 1)


def test_counters_agree_with_what_was_sent(smol: TritonServer, sdk: OrcaClient) -> None:
    wait_until_idle(smol)
    time.sleep(SETTLED)
    before = totals(smol)

    answers = [sdk.generate("word " * n, max_tokens=n, ignore_eos=True) for n in range(1, 6)]
    for bad in ({"text_input": ""}, {"text_input": "x", "top_p": 3.0}, {"text_input": "x", "heat": 1}):
        assert post(smol, bad)[0] == 400
    assert post(smol, {"text_input": "x", "beam_width": 2})[0] == 400
    assert "timeout" in RawCall(smol, {"text_input": "x", "max_tokens": 900}, timeout_us=100_000).error()
    stream = sdk.stream("x", max_tokens=900, ignore_eos=True)
    received = sum(event.num_tokens for event in itertools.islice(stream, 3) if isinstance(event, TextDelta))
    stream.close()
    wait_until_idle(smol)
    time.sleep(SETTLED)

    gained = {name: value - before[name] for name, value in totals(smol).items()}
    assert {name: gain for name, gain in gained.items() if name.startswith(("orca_fail", "orca_fin")) and gain} == {
        "orca_failures_total INVALID_ARG": 3,
        "orca_failures_total UNSUPPORTED": 1,
        "orca_failures_total UNAVAILABLE": 1,
        "orca_failures_total CANCELLED": 1,
        "orca_finished_total length": 5,
    }
    generated = sum(answer.num_output_tokens for answer in answers)
    assert generated == 15
    assert gained["vllm:prompt_tokens_total"] == sum(answer.num_input_tokens for answer in answers)
    assert gained["vllm:request_generation_tokens_sum"] == generated
    assert gained["vllm:request_prompt_tokens_count"] == gained["vllm:e2e_request_latency_seconds_count"] == 5
    assert gained["vllm:generation_tokens_total"] >= generated + received
    tokens, firsts = gained["vllm:generation_tokens_total"], gained["vllm:time_to_first_token_seconds_count"]
    assert firsts >= 6
    assert gained["vllm:request_queue_time_seconds_count"] == 7  # five that finished, one too late, one cancelled
    assert gained["vllm:request_queue_time_seconds_sum"] < gained["vllm:time_to_first_token_seconds_sum"]
    assert gained["vllm:time_per_output_token_seconds_count"] == tokens - firsts
    iterations = sum(gained[f"orca_iterations_total {kind}"] for kind in ("prefill", "decode", "mixed"))
    assert gained["orca_iteration_batch_size_count"] == gained["orca_iteration_tokens_count"] == iterations
    assert gained["orca_engine_restarts_total"] == 0


def test_latencies_of_one_request_are_its_wall_times(smol: TritonServer, sdk: OrcaClient) -> None:
    wait_until_idle(smol)
    time.sleep(SETTLED)
    before = totals(smol)
    began = time.monotonic()
    stream = sdk.stream("The sky is blue and " * 30, max_tokens=20, ignore_eos=True)
    times = [time.monotonic() - began for event in stream if isinstance(event, TextDelta)]
    ended = time.monotonic() - began
    time.sleep(SETTLED)
    gained = {name: value - before[name] for name, value in totals(smol).items()}
    # The client sees more than the server can know, little of it on a machine that has nothing else to do.
    assert gained["vllm:time_to_first_token_seconds_count"] == 1
    assert times[0] / 3 < gained["vllm:time_to_first_token_seconds_sum"] <= times[0]
    assert ended / 3 < gained["vllm:e2e_request_latency_seconds_sum"] <= ended
    between = gained["vllm:time_per_output_token_seconds_sum"]
    assert between == pytest.approx(times[-1] - times[0], abs=1, rel=0.5)
    assert gained["vllm:time_per_output_token_seconds_count"] == 19


def test_gauges_while_requests_run_and_after(smol: TritonServer) -> None:
    calls = [
        RawCall(
            smol, {"text_input": "x", "stream": True, "max_tokens": 900, "sampling_parameters": '{"ignore_eos":true}'}
        )
        for _ in range(3)
    ]
    wait_until(lambda: metric(smol, "orca_requests_running") == 3)
    assert metric(smol, "orca_kv_slots", state="reserved") == 3 * 912  # 1 + 900 in blocks of 16
    assert 3 <= metric(smol, "orca_kv_slots", state="used") < 3 * 912
    assert metric(smol, "vllm:num_requests_running") == 3
    total = metric(smol, "orca_kv_slots", state="total")
    assert metric(smol, "vllm:kv_cache_usage_perc") == pytest.approx(3 * 912 / total)
    for call in calls:
        call.close(cancel=True)
    wait_until_idle(smol)
    assert metric(smol, "vllm:kv_cache_usage_perc") == 0
