"""Validation of requests: precedence, and one clear error for whatever cannot be served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orca_backend.request import SamplingParams
from orca_backend.serving.endpoint import BadRequest, Generation, RawRequest, StopRequest, parse

DEFAULTS = SamplingParams(max_tokens=16)


def ask(
    inputs: dict[str, Any] | None = None,
    parameters: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    defaults: SamplingParams = DEFAULTS,
    request_id: str = "",
) -> Any:
    tensors: dict[str, list[Any]] = {"text_input": [b"hello"]}
    if sampling is not None:
        tensors["sampling_parameters"] = [json.dumps(sampling).encode()]
    tensors |= {name: value if isinstance(value, list) else [value] for name, value in (inputs or {}).items()}
    return parse(RawRequest(inputs=tensors, parameters=parameters or {}, request_id=request_id), defaults)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        ask(*args, **kwargs)
    return f"[{caught.value.code}] {caught.value.message}"


def test_defaults() -> None:
    generation = ask()
    assert isinstance(generation, Generation)
    assert (generation.text, generation.max_tokens, generation.stream, generation.exclude_input) == (
        "hello",
        16,
        False,
        False,
    )
    assert ask({"stream": True}).exclude_input


def test_precedence() -> None:
    defaults = SamplingParams(max_tokens=4, top_k=4, seed=4, min_p=0.4)
    generation = ask(
        {"max_tokens": 1}, {"max_tokens": 3, "top_k": 3, "seed": 3}, {"max_tokens": 2, "top_k": 2}, defaults
    )
    sampling = generation.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.min_p) == (1, 2, 3, 0.4)
    assert ask(sampling={"max_tokens": None}, defaults=defaults).max_tokens == 4


def test_numeric_strings() -> None:
    given = {
        "temperature": "0.1",
        "max_tokens": "100",
        "min_tokens": "100",
        "ignore_eos": "true",
        "stop_token_ids": ["7"],
    }
    sampling = ask(sampling=given).sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.min_tokens) == (0.1, 100, 100)
    assert sampling.ignore_eos is True
    assert sampling.stop_token_ids == [7]


def test_names_of_tensorrt_llm() -> None:
    inputs = {"min_length": 2, "random_seed": 2**64 - 1, "stop_words": [b"", "é".encode()], "end_id": 5, "pad_id": 0}
    sampling = ask({**inputs, "beam_width": 1, "length_penalty": 1.0, "bad_words": [b""]}).sampling
    assert (sampling.min_tokens, sampling.seed) == (2, 2**64 - 1)
    assert sampling.stop_strings == ["é"]
    assert sampling.stop_token_ids == [5]


def test_reserved_parameters_pass() -> None:
    assert ask(parameters={"timeout": 5, "triton_enable_empty_final_response": True}).text == "hello"


def test_what_is_said_to_the_scheduler() -> None:
    said = {"priority": -3, "tenant": "a", "cache_salt": "s", "expected_tokens": 7}
    for generation in (ask(sampling=said), ask(parameters=said)):
        assert {name: getattr(generation.sampling, name) for name in said} == said


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [0.5]}, "stop_token_ids"),
        ({"seed": 2**64}, "seed"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"ignore_eos": "perhaps"}, "ignore_eos"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"priority": 2**31}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"tenant": "x" * 257}, "tenant"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"expected_tokens": 0}, "expected_tokens"),
    ],
)
def test_wrong_sampling_parameters(sampling: dict[str, Any], field: str) -> None:
    message = refusal(sampling=sampling)
    assert message.startswith("[INVALID_ARG] ")
    assert field in message


@pytest.mark.parametrize("text", [b"[1]", b"{", b"3", b'{"temperature": NaN}', b"\xff"])
def test_sampling_parameters_that_are_no_object(text: bytes) -> None:
    assert refusal({"sampling_parameters": text}).startswith("[INVALID_ARG] sampling_parameters")


def test_wrong_parameters() -> None:
    assert "max_token:" in refusal(parameters={"max_token": 5})
    assert refusal(parameters={"stream": "maybe"}).startswith("[INVALID_ARG] stream")
    assert refusal({"text_input": b""}) == "[INVALID_ARG] text_input: the prompt is empty"
    assert "text_input: not valid UTF-8" in refusal({"text_input": b"ab\xff"})
    assert "stop_words: not valid UTF-8" in refusal({"stop_words": [b"\xe8"]})
    assert "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed." in refusal(
        {"stream": True, "exclude_input_in_output": False}
    )


@pytest.mark.parametrize(
    ("inputs", "sampling", "field"),
    [
        ({}, {"n": 2}, "n"),
        ({"bad_words": [b"", b"x"]}, None, "bad_words"),
        ({}, {"logprobs": 1}, "logprobs"),
        ({}, {"prompt_logprobs": 0}, "prompt_logprobs"),
        ({}, {"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"beam_width": 2}, None, "beam_width"),
        ({"length_penalty": 0.5}, None, "length_penalty"),
        ({"return_logprobs": True}, None, "return_logprobs"),
        ({"return_log_probs": True}, None, "return_log_probs"),
        ({"return_cumulative_logprob": True}, None, "return_cumulative_logprob"),
        ({"image": [b"aGk="]}, None, "image"),
        ({"embedding_request": b"{}"}, None, "embedding_request"),
    ],
)
def test_unbuilt_names_the_field(inputs: dict[str, Any], sampling: dict[str, Any] | None, field: str) -> None:
    assert refusal(inputs, None, sampling).startswith(f"[UNSUPPORTED] {field} ")


def test_harmless_values_pass() -> None:
    off = {"return_logprobs": False, "return_log_probs": False, "return_cumulative_logprob": False, "image": [b""]}
    sampling = {"n": 1, "logprobs": None, "logit_bias": {}, "bad_words": [""], "top_p": 0, "top_k": -1}
    assert ask({**off, "stop": False}, None, sampling).text == "hello"


def test_stop_request() -> None:
    assert ask({"stop": True}, request_id="7") == StopRequest("7")
    assert refusal({"stop": True}).startswith("[INVALID_ARG] stop")
    assert ask(parameters={"stop": "END"}).sampling.stop_strings == ["END"]


def test_chat() -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = json.dumps(chat).encode()
    assert ask({"text_input": text, "apply_chat_template": True}).messages == chat
    assert ask({"text_input": text}).messages is None


@pytest.mark.parametrize("text", ["hi", "{}", "[]", "[1]", '[{"role":"user"}]', '[{"role":"user","content":1}]'])
def test_chat_that_is_none(text: str) -> None:
    message = refusal({"text_input": text.encode(), "apply_chat_template": True})
    assert message.startswith("[INVALID_ARG] text_input")


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({"sampling_parameters": b'{"stop": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"}, "sampling_parameters: "),
        (
            {"text_input": b'[{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", "apply_chat_template": True},
            "text_input: ",
        ),
    ],
)
def test_deep_nesting_is_the_clients_error(inputs: dict[str, Any], field: str) -> None:
    """It was once answered with [INTERNAL] RecursionError."""
    message = refusal(inputs)
    assert message.startswith(f"[INVALID_ARG] {field}")
    assert message.endswith("nested too deeply")


@pytest.mark.parametrize(
    ("name", "most", "more", "limit"),
    [
        ("stop", ["x"] * 64, ["x"] * 65, "64"),
        ("stop", "x" * 1024, "x" * 1025, "1024"),
        ("stop_token_ids", [1] * 1024, [1] * 1025, "1024"),
    ],
)
def test_limits_of_what_may_stop_a_request(name: str, most: Any, more: Any, limit: str) -> None:
    assert getattr(ask(sampling={name: most}).sampling, name) == most
    message = refusal(sampling={name: more})
    assert message.startswith("[INVALID_ARG] ")
    assert name in message
    assert limit in message


def test_limits_hold_for_the_named_tensors() -> None:
    assert "stop may hold at most 64" in refusal({"stop_words": [b"x"] * 65})
    assert "stop_token_ids may hold at most 1024" in refusal({"end_id": 5}, None, {"stop_token_ids": [1] * 1024})


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [({"x" * 10**6: 1}, None), ({}, {"y" * 10**6: 1}), ({}, {"logit_bias": {str(i): 1 for i in range(10**4)}})],
)
def test_messages_repeat_little_of_what_they_refuse(parameters: dict[str, Any], sampling: dict[str, Any]) -> None:
    """A megabyte of unknown field was once sent back."""
    with pytest.raises(BadRequest) as caught:
        ask(None, parameters, sampling)
    assert len(caught.value.message) == 500
    assert caught.value.message.endswith("...")


@pytest.mark.parametrize("timeout", [-5, "-5", "soon", 1.5, True, 2**63, 2**64 - 5, [1]])
def test_timeouts_that_are_none(timeout: Any) -> None:
    assert refusal(parameters={"timeout": timeout}).startswith("[INVALID_ARG] timeout")


@pytest.mark.parametrize("timeout_us", [-5, 2**64 - 5])  # -5 as Triton's own field may hand it over
def test_negative_timeout_of_triton(timeout_us: int) -> None:
    with pytest.raises(BadRequest, match="timeout"):
        parse(RawRequest(inputs={"text_input": [b"hello"]}, timeout_us=timeout_us), DEFAULTS)


def test_timeout_of_either_kind() -> None:
    raw = RawRequest(inputs={"text_input": [b"hello"]}, parameters={"timeout": "7"}, timeout_us=5)
    given = parse(raw, DEFAULTS)
    assert isinstance(given, Generation)
    assert (given.timeout_us, ask(parameters={"timeout": "7"}).timeout_us, ask().timeout_us) == (5, 7, 0)
