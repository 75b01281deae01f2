"""Requests share iterations and must not notice: 64 at random times, and the request-level baseline."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

from wire import RawCall, Response, metric, post, wait_until

from orca_backend.server.triton_server import TritonServer

RETURNS = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
TEXT = (
    "the whale swims under ice and a choir of children sings while snow falls on the harbour where old ships wait for "
    "spring and nobody remembers who built the lighthouse or why its lamp is green"
)


def inputs(prompt: str, max_tokens: int, stream: bool = True) -> dict[str, object]:
    sampling = json.dumps({"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens})
    exclude = {} if stream else {"exclude_input_in_output": True}
    return {"text_input": prompt, "sampling_parameters": sampling, "stream": stream, **exclude, **RETURNS}


def totals(responses: list[Response]) -> tuple[str, str, int, int]:
    """Text, finish reason, number of input tokens, number of output tokens: the last two as a client adds them up."""
    assert all(
        response.names == ["text_output", "finish_reason", "num_input_tokens", "num_output_tokens"]
        for response in responses
    )
    assert {r.outputs["finish_reason"] for r in responses[:-1]} <= {b"None"}
    (num_input_tokens,) = {int(r.outputs["num_input_tokens"]) for r in responses}
    num_output_tokens = sum(int(r.outputs["num_output_tokens"]) for r in responses)
    text = "".join(r.text for r in responses)
    return text, responses[-1].outputs["finish_reason"].decode(), num_input_tokens, num_output_tokens


def test_64_requests_at_random_times_say_what_each_says_alone(smol: TritonServer, greedy) -> None:
    """Streamed or not, and with tritonclient's empty final responses enabled or not: the last content is the end."""
    generator = random.Random(4)
    requests = []
    for _ in range(64):
        prompt = " ".join(generator.choices(TEXT.split(), k=generator.randint(1, 24))).capitalize()
        requests.append((prompt, generator.randint(1, 24)))

    before = metric(smol, "orca_iteration_batch_size_sum"), metric(smol, "orca_iteration_batch_size_count")
    calls = []
    for index, (prompt, max_tokens) in enumerate(requests):
        calls.append(RawCall(smol, inputs(prompt, max_tokens, stream=index % 3 > 0), empty_final=index % 2 > 0))
        time.sleep(generator.expovariate(200))
    together = [call.finish() for call in calls]
    time.sleep(1.1)
    rows, iterations = metric(smol, "orca_iteration_batch_size_sum"), metric(smol, "orca_iteration_batch_size_count")
    assert (rows - before[0]) / (iterations - before[1]) > 1.5, "they hardly ran together"

    for index, (prompt, max_tokens) in enumerate(requests):
        responses = together[index]
        text, reason, num_input_tokens, num_output_tokens = totals(responses)
        assert (reason, num_input_tokens, num_output_tokens) == ("length", len(greedy.encode(prompt)), max_tokens)
        assert all(r.text for r in responses[:-1])
        assert len(responses) == 1 or index % 3 > 0
        status, alone = post(
            smol,
            {
                "text_input": prompt,
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "exclude_input_in_output": True,
            },
        )
        assert (status, json.loads(alone)["text_output"]) == (200, text)


def test_the_end_of_the_text_is_the_end(smol: TritonServer, sdk) -> None:
    """finish_reason "stop" when the model itself ends: the text has no trace of the token that ended it."""
    answer = sdk.chat(
        [{"role": "user", "content": "What is 2 plus 2? Answer with one number only."}], max_tokens=64, temperature=0.0
    )
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text
    assert answer.num_output_tokens < 64


def test_baseline_gives_the_same_text_when_its_batch_ends(smol: TritonServer) -> None:
    requests = {"long": ("The harbour", 400), "short": ("Snow falls", 2), "middle": ("A choir of children sings", 60)}
    late = ("Green", 3)

    # While the first runs alone the others gather; they are the next batch, and what comes then waits for its end.
    plug = RawCall(smol, inputs("Old ships", 400), model="static_baseline")
    wait_until(lambda: metric(smol, "orca_requests_running", "static_baseline") == 1)
    calls = {name: RawCall(smol, inputs(*request), model="static_baseline") for name, request in requests.items()}
    plug_end = plug.finish()[-1].at
    late_call = RawCall(smol, inputs(*late), model="static_baseline")
    answers = {name: call.finish() for name, call in calls.items()}
    ends = {name: responses[-1].at for name, responses in answers.items()}
    # All at the end: of its own accord the short one would have been through before a tenth of the batch.
    middle = plug_end + (ends["long"] - plug_end) / 2
    assert min(responses[0].at for responses in answers.values()) > middle
    assert late_call.sent_at < middle
    assert late_call.finish()[0].at > max(ends.values())

    # The same requests under iteration-level scheduling: the same texts, and the short one does not wait.
    answers["late"] = late_call.responses
    requests["late"] = late
    with ThreadPoolExecutor(4) as pool:
        orca = dict(
            zip(requests, pool.map(lambda r: RawCall(smol, inputs(*r)).finish(), requests.values()), strict=True)
        )
    assert {name: totals(r) for name, r in orca.items()} == {name: totals(r) for name, r in answers.items()}
    assert orca["short"][-1].at < orca["middle"][-1].at < orca["long"][-1].at


def test_baseline_answers_a_stream_and_http_like_orca(smol: TritonServer) -> None:
    body = {"text_input": "Old ships", "max_tokens": 4, "temperature": 0.0}
    assert post(smol, body, model="static_baseline")[0] == 200
    orca, static = (json.loads(post(smol, body, model=model)[1]) for model in ("orca", "static_baseline"))
    assert orca["text_output"] == static["text_output"]
    error = RawCall(smol, {"text_input": "x", "beam_width": 2}, model="static_baseline").error()
    assert error.startswith("[UNSUPPORTED] beam_width")
