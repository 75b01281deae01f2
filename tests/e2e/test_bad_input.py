"""Bad input gets one clear error on every way in, its code in front, and the next request works.

Over HTTP every error that a decoupled model answers has status 400 (measured with Triton 2.51, whatever its code): the
code is in the text. On a gRPC stream it is in the text as well, and in the status for a client that asks for that.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from oracle import Greedy
from servers import MAX_MODEL_LEN
from wire import RawCall, metric, post, sse, wait_until

from orca_backend.server.triton_server import TritonServer
from orca_client import InvalidArgument, OrcaClient, Unsupported

LONG = "LongInput_" * 1000


def sampling(**fields: Any) -> dict[str, Any]:
    return {"text_input": "x", "sampling_parameters": json.dumps(fields)}


# What is sent, and how the error begins and what it names. On every way in the same.
REFUSED = {
    "too long": ({"text_input": LONG}, "[INVALID_ARG] text_input: the prompt has ", f"the limit is {MAX_MODEL_LEN} "),
    "empty": ({"text_input": ""}, "[INVALID_ARG] text_input", "empty"),
    "not JSON": ({"text_input": "x", "sampling_parameters": "{"}, "[INVALID_ARG] sampling_parameters", "JSON"),
    "not an object": ({"text_input": "x", "sampling_parameters": "[1]"}, "[INVALID_ARG] sampling_parameters", "JSON"),
    "unknown field": (sampling(temprature=1), "[INVALID_ARG] sampling_parameters", "`temprature`"),
    "wrong type": (sampling(max_tokens="many"), "[INVALID_ARG]", "max_tokens"),
    "wrong type in a list": (sampling(stop=[1]), "[INVALID_ARG]", "stop"),
    "max_tokens": ({"text_input": "x", "max_tokens": 0}, "[INVALID_ARG]", "max_tokens"),
    "temperature": ({"text_input": "x", "temperature": -0.5}, "[INVALID_ARG]", "temperature"),
    "infinite": (sampling(temperature="inf"), "[INVALID_ARG]", "temperature"),
    "top_p": (sampling(top_p=1.5), "[INVALID_ARG]", "top_p"),
    "top_k": (sampling(top_k=-2), "[INVALID_ARG]", "top_k"),
    "min above max": (sampling(min_tokens=9, max_tokens=8), "[INVALID_ARG]", "min_tokens (9)"),
    "stop token": (sampling(stop_token_ids=[10**6]), "[INVALID_ARG] stop_token_ids", "1000000"),
    "n": (sampling(n=2), "[UNSUPPORTED]", "n = 2"),
    "logprobs": (sampling(logprobs=1), "[UNSUPPORTED]", "logprobs"),
    "beams": ({"text_input": "x", "beam_width": 4}, "[UNSUPPORTED] beam_width", "only 1"),
    "image": ({"text_input": "x", "image": ["aGk="]}, "[UNSUPPORTED] image", "text only"),
    "no chat": ({"text_input": "x", "apply_chat_template": True}, "[INVALID_ARG] text_input", "JSON array"),
}


@pytest.fixture(autouse=True)
def _works_afterwards(smol: TritonServer) -> Any:
    yield
    status, answer = post(smol, {"text_input": "The sky", "max_tokens": 1})
    assert status == 200
    assert json.loads(answer)["text_output"].startswith("The sky")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_way_in(smol: TritonServer, case: str) -> None:
    inputs, beginning, names = REFUSED[case]
    failures = metric(smol, "orca_failures_total", reason=beginning.split("]")[0][1:])
    for streamed in (True, False):
        call = RawCall(smol, {**inputs, "stream": streamed})
        error = call.error()
        assert len(call.responses) == 1
        assert error.startswith(beginning)
        assert names in error
    status, answer = post(smol, inputs)
    assert (status, json.loads(answer)) == (400, {"error": error})
    status, answer = post(smol, {**inputs, "stream": True}, "generate_stream")
    assert (status, sse(answer)) == (400, [{"error": error}])
    wait_until(lambda: metric(smol, "orca_failures_total", reason=beginning.split("]")[0][1:]) == failures + 4)


def test_length_that_the_error_names(smol: TritonServer, greedy: Greedy) -> None:
    length = len(greedy.encode(LONG))
    assert length > MAX_MODEL_LEN
    assert f"the prompt has {length} tokens, but the limit is {MAX_MODEL_LEN} " in post(smol, {"text_input": LONG})[1]


def test_max_tokens_beyond_the_limit_end_at_the_limit(sdk: OrcaClient, greedy: Greedy) -> None:
    prompt = "x " * (MAX_MODEL_LEN - 4)
    length = len(greedy.encode(prompt))
    assert 0 < MAX_MODEL_LEN - length < 8
    answer = sdk.generate(prompt, max_tokens=10**6, ignore_eos=True)
    assert (answer.finish_reason, answer.num_output_tokens) == ("length", MAX_MODEL_LEN - length)


@pytest.mark.parametrize("data", [b"\xff", b"caf\xe9", b"\xed\xa0\x80", b"\xf0\x9f\x98"])
def test_bytes_that_are_not_utf8(smol: TritonServer, data: bytes) -> None:
    assert RawCall(smol, {"text_input": data, "stream": True}).error().startswith("[INVALID_ARG] text_input: not valid")
    body = b'{"text_input": "' + data + b'"}'
    status, answer = post(smol, body)
    assert status == 400
    assert "error" in json.loads(answer)


@pytest.mark.parametrize("text", ["\0", "a\0b", "x\0\0", "   ", "\n", "\u200b", "\ufffd"])
def test_odd_text_is_text(smol: TritonServer, sdk: OrcaClient, greedy: Greedy, text: str) -> None:
    answer = sdk.generate(text, max_tokens=2, temperature=0.0, ignore_eos=True)
    assert (answer.num_input_tokens, answer.num_output_tokens) == (len(greedy.encode(text)), 2)
    call = RawCall(
        smol, {"text_input": text, "max_tokens": 2, "temperature": 0.0, "sampling_parameters": '{"ignore_eos":true}'}
    )
    call.finish()
    assert call.text == text + answer.text  # unstreamed: the prompt in front, NULs at its end included


def test_a_megabyte_of_text(smol: TritonServer) -> None:
    assert "but the limit is" in RawCall(smol, {"text_input": "word " * 200_000, "stream": True}).error()


def test_streaming_with_the_prompt_in_front(smol: TritonServer) -> None:
    error = RawCall(smol, {"text_input": "x", "stream": True, "exclude_input_in_output": False}).error()
    text = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    assert error == f"[INVALID_ARG] {text}"


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"text_input": np.array([["x"]], np.object_)}, "Expected [1], got [1,1]"),
        ({"text_input": ["x", "y"]}, "Expected [1], got [2]"),
        (
            {"text_input": "x", "max_tokens": np.array([5], np.uint32)},
            "data-type is 'UINT32', but model 'orca' expects 'INT32'",
        ),
        ({"text_input": "x", "unheard_of": 1}, "unexpected inference input 'unheard_of'"),
        ({"stream": True}, "text_input"),
    ],
)
def test_what_triton_itself_refuses(smol: TritonServer, sdk: OrcaClient, inputs: dict[str, Any], text: str) -> None:
    assert text in RawCall(smol, inputs).error()


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (
            400,
            {"text_input": "a", "stop_token_ids": ["x"]},
            "parameter 'stop_token_ids' has invalid type. It should be",
        ),
        (400, {"text_input": ["a", "b"]}, "The schema can not convert input 'text_input' to tensor with proper shape"),
        (400, {}, "missing required input(s) ['text_input']"),
        (500, {"text_input": {"a": 1}}, "Unable to parse"),
        (500, {"text_input": 5}, "Unable to parse"),
        (500, {"text_input": "a", "max_tokens": "x"}, "Unable to parse"),
        (500, b'{"text_input"', "failed to parse the request JSON buffer"),
    ],
)
@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_what_triton_itself_refuses_over_http(smol: TritonServer, status: int, body: Any, text: str, path: str) -> None:
    got, answer = post(smol, body, path)
    assert got == status
    assert text in json.loads(answer)["error"]


def test_a_list_of_stop_words_is_a_tensor(smol: TritonServer) -> None:
    status, answer = post(smol, {"text_input": "a", "max_tokens": 2, "stop_words": ["branch", ""], "bad_words": [""]})
    assert (status, "text_output" in json.loads(answer)) == (200, True)


def test_generate_streams_one_response_only(smol: TritonServer) -> None:
    """Triton's own: 200 with an error in the body for a stream of several responses, and a stream of one is fine."""
    status, answer = post(smol, {"text_input": "a", "max_tokens": 4, "stream": True, "ignore_eos": True})
    assert (status, "exactly 1 response" in json.loads(answer)["error"]) == (200, True)
    status, answer = post(smol, {"text_input": "a", "max_tokens": 4, "stream": False}, "generate_stream")
    assert (status, len(sse(answer))) == (200, 1)


def test_typed_errors_of_the_sdk(sdk: OrcaClient) -> None:
    with pytest.raises(InvalidArgument, match="temperature"):
        sdk.generate("x", temperature=-1.0)
    with pytest.raises(Unsupported, match="bad_words"):
        list(sdk.stream("x", bad_words=["y"]))
    with pytest.raises(InvalidArgument, match="unknown field `heat`"):
        sdk.generate("x", heat=1)  # type: ignore[call-arg]
