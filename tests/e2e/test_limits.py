"""Deadlines, the queue's limit, and the chat template, for clients of every kind."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from oracle import Greedy
from servers import new_server
from wire import QUIET, RawCall, metric, post, sse, wait_until, wait_until_idle

from orca_backend.server.triton_server import TritonServer
from orca_client import DeadlineExceeded, OrcaClient, Unavailable

EXPIRED = "[UNAVAILABLE] Request timeout expired"
HOPELESS = f"{EXPIRED}: its deadline cannot be met"  # of a client's own deadline, which the scheduler knows
EARLY = 0.25  # seconds: no deadline is met by a token that comes an iteration later
LATE = 3.0  # seconds: so much may happen on a busy machine; an answer that ignores its deadline takes longer
DEFAULT_DEADLINE = 4.0  # so many requests as fill the queue can be sent meanwhile
QUEUE = 8
PROMPT = "The sky is"
ENDLESS = {"text_input": PROMPT, "sampling_parameters": '{"max_tokens": 900, "ignore_eos": true}'}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Little room, little time, two requests at once, and the slower kernels, so that nothing ends by itself."""
    settings = {"scheduler__max_bs": 2, "limits__max_queue_size": QUEUE, "limits__request_timeout": DEFAULT_DEADLINE}
    settings["kernels"] = "torch"
    log = tmp_path_factory.mktemp("limits") / "triton.log"
    with new_server(smollm2, log, limits__drain_timeout=2.0, **settings) as server:
        yield server


@pytest.fixture(autouse=True)
def _idle_afterwards(server: TritonServer) -> Iterator[None]:
    yield
    wait_until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_of_a_request(server: TritonServer, stream: bool) -> None:
    """Running and waiting requests alike, each at its own time; what has been streamed by then is the client's."""
    timeouts = [0.6, 0.9, 0.3, 0.7]  # two of the four wait, one of them for longer than it has
    calls = [RawCall(server, {**ENDLESS, "stream": stream}, timeout_us=int(1e6 * timeout)) for timeout in timeouts]
    assert {call.error() for call in calls} <= {EXPIRED, HOPELESS}
    late = [call.responses[-1].at - call.sent_at - timeout for call, timeout in zip(calls, timeouts, strict=True)]
    assert min(late) > -EARLY
    assert max(late) < LATE, late
    assert (sum(len(call.responses) for call in calls) > len(calls)) == stream


def test_deadline_of_the_configuration(server: TritonServer) -> None:
    call = RawCall(server, {**ENDLESS, "stream": True})
    assert call.error() == EXPIRED
    assert -EARLY < call.responses[-1].at - call.sent_at - DEFAULT_DEADLINE < LATE
    status, answer = post(server, {**ENDLESS, "timeout": 300_000})  # HTTP clients bring it as a request parameter
    assert status == 400
    assert json.loads(answer)["error"] in (EXPIRED, HOPELESS)


def test_deadline_of_the_sdk_is_the_servers(server: TritonServer) -> None:
    failures = metric(server, "orca_failures_total", reason="UNAVAILABLE")
    with OrcaClient(server.grpc_url) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="Request timeout expired"):
            client.generate(PROMPT, max_tokens=900, ignore_eos=True, timeout=0.5)
        assert 0.5 - EARLY <= time.monotonic() - began < 0.5 + LATE
    wait_until(lambda: metric(server, "orca_failures_total", reason="UNAVAILABLE") == failures + 1)


def test_100_requests_where_8_have_room(server: TritonServer) -> None:
    calls = [RawCall(server, ENDLESS) for _ in range(100)]
    with ThreadPoolExecutor(20) as pool:
        errors = list(pool.map(RawCall.error, calls))
    refused = f"[UNAVAILABLE] Exceeds maximum queue size: {QUEUE} requests are in the server"
    assert Counter(errors) == {refused: 100 - QUEUE, EXPIRED: QUEUE}
    for call, error in zip(calls, errors, strict=True):
        if error == refused:  # at once, not after the deadline
            assert call.responses[-1].at - call.sent_at < DEFAULT_DEADLINE / 2
    with OrcaClient(server.grpc_url, retries=0) as client:
        assert client.generate(PROMPT, max_tokens=1).num_output_tokens == 1


def test_refusal_is_a_typed_error_and_retries_wait_for_room(server: TritonServer) -> None:
    calls = [RawCall(server, ENDLESS, timeout_us=3_000_000) for _ in range(QUEUE)]
    time.sleep(0.3)
    with OrcaClient(server.grpc_url, retries=0) as client, pytest.raises(Unavailable, match="Exceeds maximum queue"):
        client.generate(PROMPT)
    with OrcaClient(server.grpc_url, retries=20) as client:
        assert client.generate(PROMPT, max_tokens=2, ignore_eos=True, timeout=20).num_output_tokens == 2
    assert {call.error() for call in calls} <= {EXPIRED, HOPELESS}


MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def test_chat_template_on_every_way_in(server: TritonServer, greedy: Greedy) -> None:
    expected = greedy.decode(greedy.ids(RENDERED, 8))
    assert "Paris" in expected

    call = RawCall(
        server,
        {
            "text_input": json.dumps(MESSAGES),
            "apply_chat_template": True,
            "stream": True,
            "return_num_input_tokens": True,
            "max_tokens": 8,
            "temperature": 0.0,
        },
    )
    responses = call.finish()
    assert call.text == expected
    assert int(responses[-1].outputs["num_input_tokens"]) == len(greedy.encode(RENDERED))

    body = {"text_input": json.dumps(MESSAGES), "apply_chat_template": True, "max_tokens": 8, "temperature": 0.0}
    assert json.loads(curl(server, "generate", body))["text_output"] == RENDERED + expected
    body["exclude_input_in_output"] = True
    assert json.loads(curl(server, "generate", body))["text_output"] == expected
    events = sse(curl(server, "generate_stream", {**body, "stream": True}))
    assert "".join(event["text_output"] for event in events) == expected
    with OrcaClient(server.grpc_url) as client:
        assert client.chat(MESSAGES, max_tokens=8, temperature=0.0).text == expected


def curl(server: TritonServer, path: str, body: dict[str, object]) -> str:
    command = ["curl", "-sN", f"{server.http_url}/v2/models/orca/{path}", "-d", json.dumps(body)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=30).stdout.decode()


def test_curl_sees_each_token_as_it_comes(server: TritonServer) -> None:
    body = json.dumps({"text_input": PROMPT, "stream": True, "max_tokens": 12, "ignore_eos": True})
    command = ["curl", "-sN", f"{server.http_url}/v2/models/orca/generate_stream", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        times = [time.monotonic() for line in process.stdout if line.startswith(b"data: ")]
    assert len(times) > 6
    assert times[-1] - times[0] > QUIET, "all came at once"
