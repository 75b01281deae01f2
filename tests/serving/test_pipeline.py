"""The stub's whole way without Triton: a real pipeline, a small real engine process, replies kept in memory."""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from orca_backend.config import EngineConfig, LimitsConfig
from orca_backend.serving.endpoint import Generation, RawRequest
from orca_backend.serving.metrics import Metrics
from orca_backend.serving.pipeline import Pipeline
from orca_backend.serving.session import Failure, Parcel

SCRIPT = Path(__file__).with_name("scripted_engine.py")


class Kept:
    """A reply that keeps what is sent; `slow` is how long a send takes."""

    def __init__(self, slow: float = 0.0) -> None:
        self.slow = slow
        self.parcels: list[Parcel] = []
        self.num_input_tokens = 0
        self.cancelled = False
        self.final: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.finals = 0
        self.ended = 0.0

    def send(self, generation: Generation, parcel: Parcel, *, num_input_tokens: int) -> None:
        assert not self.finals, "a response after the final one"
        time.sleep(self.slow)
        self.num_input_tokens = num_input_tokens
        self._keep(parcel)

    def refuse(self, failure: Failure) -> None:
        self._keep(Parcel(failure=failure))

    def acknowledge(self) -> None:
        self._keep(Parcel(finish_reason="stop"))

    def is_cancelled(self) -> bool:
        return self.cancelled

    def _keep(self, parcel: Parcel) -> None:
        self.parcels.append(parcel)
        if parcel.is_final:
            self.finals += 1
            self.final.put(time.monotonic())

    def wait(self, timeout: float = 30.0) -> float:
        """When it ended."""
        self.ended = self.final.get(timeout=timeout)
        return self.ended

    @property
    def text(self) -> str:
        return "".join(parcel.text for parcel in self.parcels)

    @property
    def end(self) -> str:
        last = self.parcels[-1]
        return f"[{last.failure.code}] {last.failure.message}" if last.failure else str(last.finish_reason)


class Family:
    """Stands where Triton's MetricFamily is; the values are checked in the real server."""

    COUNTER, GAUGE = range(2)
    values: ClassVar[dict[tuple[str, str], float]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        key = (self.name, labels.get("reason", labels.get("le", "")))
        Family.values[key] = 0.0

        class Handle:
            def increment(self, value: float) -> None:
                Family.values[key] += value

            def set(self, value: float) -> None:
                Family.values[key] = value

        return Handle()


Make = Callable[..., Pipeline]


@pytest.fixture
def make(tiny_llama: Path) -> Iterator[Make]:
    made = []

    def pipeline(mode: str = "echo", **limits: Any) -> Pipeline:
        config = EngineConfig(model=str(tiny_llama), limits=LimitsConfig(**limits))
        metrics = Metrics(Family, {"model": "m"}, print, period=0.05)
        pipeline = Pipeline(config, metrics, print, command=[sys.executable, str(SCRIPT), mode])
        made.append((pipeline, metrics))
        return pipeline

    yield pipeline
    for pipeline_, metrics in made:
        pipeline_.close()
        metrics.close()


def ask(
    pipeline: Pipeline, text: str, *, slow: float = 0.0, request_id: str = "", timeout_us: int = 0, **inputs: Any
) -> Kept:
    reply = Kept(slow)
    tensors = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    if "sampling" in tensors:
        tensors["sampling_parameters"] = [json.dumps(tensors.pop("sampling")[0]).encode()]
    raw = RawRequest(inputs={"text_input": [text.encode()], **tensors}, request_id=request_id, timeout_us=timeout_us)
    pipeline.accept(raw, reply)
    return reply


def drained(pipeline: Pipeline) -> bool:
    return drained_to(pipeline, 0)


def test_one_response_or_many_give_the_same_text(make: Make) -> None:
    pipeline = make()
    whole, stream = ask(pipeline, "聪 🧑‍🚀!", max_tokens=50), ask(pipeline, "聪 🧑‍🚀!", max_tokens=50, stream=True)
    whole.wait(), stream.wait()
    assert len(whole.parcels) == 1
    assert whole.text == "聪 🧑‍🚀!" * 2
    assert stream.text == "聪 🧑‍🚀!"
    assert all(parcel.text for parcel in stream.parcels)
    assert sum(parcel.num_tokens for parcel in stream.parcels) == stream.num_input_tokens == 16
    assert (whole.end, stream.end) == ("length", "length")
    assert drained(pipeline)


def test_what_the_scheduler_is_told(make: Make) -> None:
    said = {"priority": -3, "tenant": "a", "cache_salt": "s", "expected_tokens": 99}
    began = time.monotonic()
    reply = ask(make("describe"), "abc", sampling={**said, "max_tokens": 50}, timeout_us=5_000_000)
    reply.wait()
    request = json.loads(reply.end.removeprefix("[INTERNAL] "))
    assert {name: request[name] for name in said} == {**said, "expected_tokens": 50}  # it can be no more
    assert began + 5 <= request["deadline"] < time.monotonic() + 5  # one clock for all processes


def test_a_slow_client_gets_fewer_and_longer_responses(make: Make) -> None:
    pipeline = make()
    slow = ask(pipeline, "abcdefghijklmnopqrstuvwxyz", slow=0.05, stream=True, max_tokens=50)
    slow.wait()
    assert slow.text == "abcdefghijklmnopqrstuvwxyz"
    assert len(slow.parcels) < 10


def test_a_part_that_cannot_be_sent_is_not_left_out_in_silence(make: Make) -> None:
    """As when shared memory is full: what follows would be text with a hole."""

    class Hindered(Kept):
        def send(self, generation: Generation, parcel: Parcel, *, num_input_tokens: int) -> None:
            if parcel.text:
                raise RuntimeError("no shared memory is left")
            super().send(generation, parcel, num_input_tokens=num_input_tokens)

    pipeline = make("hold")
    reply = Hindered()
    pipeline.accept(RawRequest(inputs={"text_input": [b"a"], "stream": [True]}), reply)
    (session,) = pipeline._sessions.values()
    session.put("a part", 2)
    pipeline._responder.wake(session)
    reply.wait()
    assert reply.end.startswith("[INTERNAL] a part of the answer could not be sent: RuntimeError: no shared memory")
    assert (len(reply.parcels), reply.finals) == (1, 1)
    assert drained(pipeline)


def test_stop_string_ends_the_request(make: Make) -> None:
    pipeline = make()
    reply = ask(pipeline, "one, two, three", stream=True, max_tokens=50, stop_words=[b"two"])
    reply.wait()
    assert (reply.text, reply.end) == ("one, ", "stop")
    assert sum(parcel.num_tokens for parcel in reply.parcels) == len("one, two")
    assert drained(pipeline)


def test_the_stop_token_counts_but_has_no_text(make: Make) -> None:
    pipeline = make()
    (id_c,) = pipeline._encoder.encode("c")
    for include, text in ((False, "ab"), (True, "abc")):
        settings = {"stop_token_ids": [id_c], "include_stop_str_in_output": include}
        reply = ask(pipeline, "abcd", stream=True, max_tokens=50, sampling=settings)
        reply.wait()
        assert (reply.text, reply.end) == (text, "stop")
        assert sum(parcel.num_tokens for parcel in reply.parcels) == 3


def test_output_is_clamped_to_what_the_engine_holds(make: Make) -> None:
    pipeline = make(max_model_len=12)
    reply = ask(pipeline, "abcdefgh", max_tokens=10**6, stream=True)
    reply.wait()
    assert (reply.text, reply.end) == ("abcd", "length")
    too_long = ask(pipeline, "x" * 12)
    too_long.wait()
    assert too_long.end.startswith("[INVALID_ARG] text_input: the prompt has 12 tokens, but the limit is 12 ")


def test_a_client_that_leaves_is_noticed_within_100_ms(make: Make) -> None:
    pipeline = make("hold")
    replies = [ask(pipeline, "a") for _ in range(50)]
    delays = []
    for reply in replies[::6]:
        time.sleep(0.02)
        began = time.monotonic()
        reply.cancelled = True
        delays.append(reply.wait() - began)
        assert reply.end.startswith("[CANCELLED]")
    assert statistics.median(delays) < 0.1, delays
    left = len(delays)
    assert pipeline.in_flight in (50 - left, 51 - left)
    assert sum(reply.finals for reply in replies) == left


def test_deadlines(make: Make) -> None:
    pipeline = make("hold", request_timeout=0.5)
    began = time.monotonic()
    short, default = ask(pipeline, "a", timeout_us=150_000), ask(pipeline, "a")
    assert 0.15 <= short.wait() - began < default.wait() - began
    assert default.ended - began >= 0.5
    assert short.end == default.end == "[UNAVAILABLE] Request timeout expired"


def test_one_more_than_the_queue_holds(make: Make) -> None:
    pipeline = make("hold", max_queue_size=3)
    held = [ask(pipeline, "a") for _ in range(3)]
    refused = ask(pipeline, "a")
    refused.wait()
    assert refused.end.startswith("[UNAVAILABLE] Exceeds maximum queue size")
    held[0].cancelled = True
    held[0].wait()
    assert drained_to(pipeline, 2)
    assert not ask(pipeline, "a").finals


def drained_to(pipeline: Pipeline, count: int) -> bool:
    return eventually(lambda: pipeline.in_flight == count)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_stop_request_ends_the_one_with_its_id(make: Make) -> None:
    pipeline = make("hold")
    one, other = ask(pipeline, "a", request_id="1"), ask(pipeline, "a", request_id="2")
    stop = ask(pipeline, "ignored", request_id="1", stop=True)
    stop.wait(), one.wait()
    assert one.end.startswith("[CANCELLED]")
    assert stop.text == ""
    assert not other.finals


def test_death_of_the_engine_ends_each_request_once(make: Make) -> None:
    pipeline = make("hold")
    replies = [ask(pipeline, "a", stream=bool(i % 2)) for i in range(20)]
    time.sleep(0.2)
    os.kill(pipeline.info.pid, 9)
    for reply in replies:
        reply.wait(30)
        assert reply.end.startswith("[UNAVAILABLE] the engine process died (SIGKILL)")
    at_once = ask(pipeline, "a")
    at_once.wait(30)
    assert at_once.end.startswith("[UNAVAILABLE] the engine process died")
    assert drained(pipeline)
    assert all(reply.finals == 1 for reply in replies)


def test_a_hung_engine_holds_up_no_deadline_and_is_replaced(make: Make) -> None:
    """The tokenizer thread once sat in a send to it, and the responder thread behind that in the cancels."""
    pipeline = make("hold", max_model_len=40_000, engine_silence=6.0)
    hung = pipeline.info.pid
    os.kill(hung, signal.SIGSTOP)
    began = time.monotonic()
    replies = [ask(pipeline, "word " * 5200, timeout_us=1_000_000) for _ in range(24)]
    waiting = ask(pipeline, "a")
    died = waiting.wait()
    assert waiting.end.startswith("[UNAVAILABLE] the engine process died (SIGKILL)")
    for reply in replies:
        assert began + 1 <= reply.wait() < died
        assert reply.end == "[UNAVAILABLE] Request timeout expired"
    assert died - began > 3  # half the silence
    eventually(lambda: pipeline.info.pid != hung)
    after = ask(pipeline, "a", timeout_us=300_000)
    after.wait()
    assert after.end == "[UNAVAILABLE] Request timeout expired"  # it was taken: the script's engine never answers
    assert drained(pipeline)
    assert all(reply.finals == 1 for reply in replies)


def test_failures_are_counted_by_reason(make: Make) -> None:
    pipeline = make("hold", request_timeout=0.2)
    for _ in range(10):
        ask(pipeline, "").wait()
    ask(pipeline, "a", beam_width=2).wait()
    ask(pipeline, "a").wait()
    eventually(lambda: Family.values.get(("orca_failures_total", "UNAVAILABLE")) == 1)
    failures = {reason: n for (name, reason), n in Family.values.items() if name == "orca_failures_total" and n}
    assert failures == {"INVALID_ARG": 10, "UNSUPPORTED": 1, "UNAVAILABLE": 1}


def test_fail_all_and_close_leave_nobody_without_an_answer(make: Make) -> None:
    pipeline = make("hold")
    replies = [ask(pipeline, "a") for _ in range(10)]
    pipeline.fail_all("the server is stopping")
    for reply in replies:
        reply.wait()
        assert reply.end == "[UNAVAILABLE] the server is stopping"


def test_the_serving_room_never_imports_the_engine() -> None:
    rooms = (
        "pipeline",
        "responder",
        "engine_client",
        "endpoint",
        "tokenizer",
        "detokenizer",
        "metrics",
        "drain",
        "session",
    )
    code = (
        f"import sys, importlib\nfor room in {rooms}: importlib.import_module('orca_backend.serving.' + room)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'orca_kernels')"
        " or name.startswith(('orca_backend.engine', 'orca_backend.models'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
