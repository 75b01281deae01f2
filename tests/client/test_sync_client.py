from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from mock_prompts import MOCK_MODELS, MODEL, endless, script

from orca_backend.server import TritonServer
from orca_client import (
    AsyncOrcaClient,
    Cancelled,
    Completion,
    DeadlineExceeded,
    Finished,
    InvalidArgument,
    NotFound,
    OrcaClient,
    OrcaError,
    TextDelta,
    Unavailable,
)
from orca_client.client import TokenStream
from orca_client.protocol import build_request
from orca_client.retry import Attempts


def test_stream_gives_each_token_as_it_comes_then_the_totals(client):
    with client.stream(script("Hello", " wörld", " 聪🧑‍🚀", delay=0.5), model=MODEL) as stream:
        events = [next(stream)]
        start = time.monotonic()
        events += stream
    assert events == [TextDelta("Hello", 1), TextDelta(" wörld", 1), TextDelta(" 聪🧑‍🚀", 1), Finished("length", 7, 3)]
    assert time.monotonic() - start > 0.5, "the first token must not wait for the last"


def test_generate_equals_the_concatenated_stream(client):
    prompt = script(*[f"t{i} " for i in range(50)])
    streamed = list(client.stream(prompt, model=MODEL))
    completion = client.generate(prompt, model=MODEL, request_id="whole")
    assert completion == Completion("".join(e.text for e in streamed[:-1]), "length", 7, 50, "whole")
    assert sum(e.num_tokens for e in streamed[:-1]) == streamed[-1].num_output_tokens == 50


def test_tokens_without_text_are_counted(client):
    assert list(client.stream(script("a", "", ""), model=MODEL)) == [
        TextDelta("a", 1),
        TextDelta("", 1),
        TextDelta("", 1),
        Finished("length", 7, 3),
    ]


def test_a_final_flag_without_content_ends_the_stream(client):
    assert list(client.stream(script("a", bare_final=True), model=MODEL)) == [
        TextDelta("a", 1),
        Finished("length", 7, 1),
    ]


def test_all_options_reach_the_model(client, report):
    sampling = {"max_tokens": 9, "temperature": 0.5, "stop": ["\n", "聪"], "logit_bias": {"5": -1.0}, "seed": 2**40}
    client.generate(script("a"), model=MODEL, request_id="options", timeout=12.5, top_k=None, **sampling)
    seen = report("options")
    assert json.loads(seen["inputs"].pop("sampling_parameters")) == sampling
    assert seen["inputs"] == {
        "text_input": script("a"),
        "stream": False,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    assert 12_000_000 < seen["timeout_us"] <= 12_500_000


def test_chat_sends_the_messages_and_asks_for_the_template(client, report):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": script("a", "b")}]
    assert client.chat(messages, model=MODEL, request_id="chat").text == "ab"
    assert list(client.stream_chat(messages, model=MODEL))[-1] == Finished("length", 7, 2)
    inputs = report("chat")["inputs"]
    assert json.loads(inputs["text_input"]) == messages
    assert inputs["apply_chat_template"] is True


def leave_the_loop(stream):
    for _ in stream:
        break


def leave_the_block(stream):
    with stream:
        next(stream)


def close(stream):
    next(stream)
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize("leave", [leave_the_loop, leave_the_block, close])
def test_leaving_cancels_on_the_server(client, sees_cancel, leave):
    request_id = leave.__name__
    leave(client.stream(endless(), model=MODEL, request_id=request_id))
    assert sees_cancel(request_id)


def test_closing_from_another_thread_wakes_the_reader(client, sees_cancel):
    stream = client.stream(script("a", hang_at=0), model=MODEL, request_id="woken")
    threading.Timer(0.2, stream.close).start()
    with pytest.raises(Cancelled):
        next(stream)
    assert sees_cancel("woken")


def test_closing_between_two_tries_ends_the_retries(server, report):
    with OrcaClient(server.grpc_url, retries=10**6) as client:
        stream = client.stream(script(fail_at=0, message="[UNAVAILABLE] full"), model=MODEL, request_id="given up")
        threading.Timer(0.3, stream.close).start()
        with pytest.raises((Unavailable, Cancelled)):
            next(stream)
    tries = report("given up")["tries"]
    time.sleep(0.2)
    assert report("given up")["tries"] == tries > 1


def test_closing_while_another_try_opens_cancels_that_try(client):
    calls = []

    def open_call(*args, **kwargs):
        if calls:
            stream.close()
        calls.append(client._open_call(*args, **kwargs))
        return calls[-1]

    prompt = script("a", fail_at=0, times=1, hang_at=0, message="[UNAVAILABLE] full")
    request = build_request(prompt, model=MODEL, stream=True, sampling={})
    stream = TokenStream(open_call, request, Attempts(1, None))
    with pytest.raises(Unavailable):
        next(stream)
    assert calls[1].cancelled()


def test_closing_the_client_ends_its_streams(server, sees_cancel):
    other = OrcaClient(server.grpc_url)
    stream = other.stream(endless(), model=MODEL, request_id="orphan")
    next(stream)
    other.close()
    with pytest.raises(Cancelled):
        list(stream)
    assert sees_cancel("orphan")


def test_a_finished_request_is_not_cancelled(client, report):
    with client.stream(script("a"), model=MODEL, request_id="finished") as stream:
        list(stream)
    time.sleep(0.2)  # a cancel would arrive by now
    assert report("finished")["state"] == "done"


def test_killing_the_client_process_cancels(server, sees_cancel):
    code = (
        "import sys; from orca_client import OrcaClient\n"
        "for _ in OrcaClient(sys.argv[1]).stream(sys.argv[2], model='scripted', request_id='killed'): print(flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, server.grpc_url, endless()], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    assert sees_cancel("killed")


def test_deadline_ends_a_silent_request_on_both_sides(client, sees_cancel):
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        client.generate(script("a", hang_at=0), model=MODEL, timeout=0.3, request_id="late")
    assert 0.3 <= time.monotonic() - start < 20
    assert caught.value.request_id == "late"
    assert sees_cancel("late")


def test_deadline_spans_all_retries(server):
    with OrcaClient(server.grpc_url, retries=10**6) as patient:
        start = time.monotonic()
        with pytest.raises((Unavailable, DeadlineExceeded)):
            patient.generate(script(fail_at=0, message="[UNAVAILABLE] full"), model=MODEL, timeout=0.6)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_must_be_positive(client, timeout):
    with pytest.raises(InvalidArgument, match="timeout") as caught:
        client.generate("x", timeout=timeout)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("timeout", "seen"), [(float("inf"), 0), (1e13, 10**15), (1e308, 10**15), (10**400, 10**15)])
def test_a_timeout_may_be_as_long_as_one_likes(client, report, timeout, seen):
    assert client.generate(script("a"), model=MODEL, request_id="patient", timeout=timeout).text == "a"
    assert report("patient")["timeout_us"] == pytest.approx(seen, abs=10**7)
    assert client.server_ready(timeout)
    assert client.model_ready(MODEL, timeout)


def test_retries_until_the_server_is_available(client, report):
    prompt = script("a", "b", fail_at=0, times=2, message="[UNAVAILABLE] the engine restarts")
    events = list(client.stream(prompt, model=MODEL, request_id="retried"))
    assert events == [TextDelta("a", 1), TextDelta("b", 1), Finished("length", 7, 2)]
    assert report("retried")["tries"] == 3


def test_generate_retries_what_nobody_has_seen(client, report):
    prompt = script("a", "b", fail_at=1, times=1, message="[UNAVAILABLE] the engine restarts")
    assert client.generate(prompt, model=MODEL, request_id="unseen").text == "ab"
    assert report("unseen")["tries"] == 2


def test_never_retries_after_the_first_token(client, report):
    prompt = script("a", "b", fail_at=1, times=1, message="[UNAVAILABLE] the engine restarts")
    stream = client.stream(prompt, model=MODEL, request_id="seen")
    assert next(stream) == TextDelta("a", 1)
    with pytest.raises(Unavailable, match="the engine restarts"):
        next(stream)
    assert list(stream) == []
    assert report("seen")["tries"] == 1


@pytest.mark.parametrize(
    ("retries", "message", "tries"),
    [(0, "[UNAVAILABLE] full", 1), (3, "[UNAVAILABLE] full", 4), (3, "[INVALID_ARG] no", 1), (3, "broken", 1)],
)
def test_retries_are_bounded_and_only_for_what_may_pass(server, report, retries, message, tries):
    with OrcaClient(server.grpc_url, retries=retries) as client, pytest.raises(OrcaError):
        client.generate(script(fail_at=0, message=message), model=MODEL, request_id=f"{retries} {message}")
    assert report(f"{retries} {message}")["tries"] == tries


def test_many_streams_share_one_connection(server, client):
    def run(number: int) -> str:
        prompt = script(*[f"{number}.{i} " for i in range(20)], delay=0.01)
        return "".join(e.text for e in client.stream(prompt, model=MODEL) if isinstance(e, TextDelta))

    port = int(server.grpc_url.rpartition(":")[2])
    with ThreadPoolExecutor(64) as pool:
        answers = pool.map(run, range(64))
        connections = [c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port]
        assert list(answers) == ["".join(f"{n}.{i} " for i in range(20)) for n in range(64)]
    assert len(connections) == 1


def test_readiness(client):
    assert client.server_ready()
    assert client.model_ready(MODEL)
    assert not client.model_ready("no-such-model")


def test_no_server():
    with OrcaClient("127.0.0.1:1", retries=1) as client:
        assert not client.server_ready()
        assert not client.model_ready()
        with pytest.raises(Unavailable, match="refused"):
            client.generate("x")


def test_unknown_model(client):
    with pytest.raises(NotFound, match="no-such-model"):
        client.generate("x", model="no-such-model")


def test_text_without_utf8_form_is_refused(client):
    for asked in ({"prompt": "\udcff"}, {"request_id": "\ud800"}, {"model": "\ud800"}):
        with pytest.raises(InvalidArgument, match="surrogates"):
            client.generate(**{"prompt": "x", "model": MODEL, **asked})
    with pytest.raises(InvalidArgument, match="surrogates"):
        client.model_ready("\ud800")


def test_what_is_nested_too_deeply_is_refused(client):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidArgument, match="recursion"):
        client.chat([{"role": "user", "content": nested}], model=MODEL)
    with pytest.raises(InvalidArgument, match="recursion"):
        client.generate("x", model=MODEL, logit_bias=nested)


@pytest.mark.parametrize("kind", [OrcaClient, AsyncOrcaClient])
@pytest.mark.parametrize("url", ["", " ", "\ud800"])
def test_a_url_must_be_an_address(kind, url):
    with pytest.raises(InvalidArgument, match="url"):
        kind(url)


def test_a_closed_client_says_so(server):
    client = OrcaClient(server.grpc_url)
    assert client.server_ready()
    client.close()
    client.close()
    for call in (client.generate, client.stream):
        with pytest.raises(Cancelled, match="the client is closed"):
            call(script("a"), model=MODEL)
    assert not client.server_ready()
    assert not client.model_ready(MODEL)


def test_closing_the_client_between_two_tries_ends_the_retries(server):
    client = OrcaClient(server.grpc_url, retries=10**6)
    stream = client.stream(script(fail_at=0, message="[UNAVAILABLE] full"), model=MODEL)
    threading.Timer(0.3, client.close).start()
    with pytest.raises(Cancelled):
        next(stream)


def test_a_killed_server_ends_open_streams_and_is_not_retried(tmp_path):
    with TritonServer(MOCK_MODELS, log=tmp_path / "log") as doomed, OrcaClient(doomed.grpc_url, retries=5) as client:
        stream = client.stream(endless(), model=MODEL)
        next(stream)
        os.kill(doomed.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(Unavailable):
            list(stream)
        assert time.monotonic() - start < 20


def test_imports_nothing_of_the_server():
    code = (
        "import sys, orca_client.cli\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('orca_backend', 'torch', 'msgspec')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
