"""Streamed text is the text: SmolLM2's own, byte for byte, however the stream is cut and whoever reads it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from oracle import Greedy
from wire import post, sse

from orca_backend.server.triton_server import TritonServer
from orca_client import Event, Finished, OrcaClient, TextDelta

REPLACEMENT = "\ufffd"
SCRIPTS = {
    "emoji": ("Emoji list: 🎉 🚀 🌍 🎉 🚀 🌍 🎉 🚀", "[\U0001f300-\U0001faff]"),
    "joined emoji": ("👩‍🚀🧑‍🚀👩‍🚀🧑‍🚀👩‍🚀🧑‍🚀", "\U0001f9d1\u200d\U0001f680"),
    "chinese": ("聪明的孩子聪明的孩子聪明的", "[\u4e00-\u9fff]"),
    "cyrillic": ("Привет, мир! Меня зовут Иван. Я живу в Москве и", "[\u0400-\u04ff]"),
}
ENGLISH = "The sky is"
LENGTH = 20


def joined(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def numbers(events: list[Event]) -> list[int]:
    return [event.num_tokens for event in events if isinstance(event, TextDelta)]


def stream_and_whole(sdk: OrcaClient, prompt: str, **sampling) -> tuple[list[Event], str]:
    """The events of a stream, and the text of the same request unstreamed, which must agree in everything."""
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(lambda: list(sdk.stream(prompt, **sampling)))
        whole = pool.submit(lambda: sdk.generate(prompt, **sampling)).result()
        events = streamed.result()
    assert joined(events).encode() == whole.text.encode()
    assert events[-1] == Finished(whole.finish_reason, whole.num_input_tokens, whole.num_output_tokens)
    assert sum(numbers(events)) == whole.num_output_tokens
    assert all(event.text for event in events[:-2]), "a response that is not the last holds text"
    return events, whole.text


def ends_inside_a_character(greedy: Greedy, ids: list[int]) -> list[int]:
    """After how many of the tokens the text is incomplete."""
    return [n for n in range(1, len(ids)) if greedy.decode(ids[:n]).endswith(REPLACEMENT)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_text_of_many_tokens_per_character(smol: TritonServer, sdk: OrcaClient, greedy: Greedy, script: str) -> None:
    prompt, characters = SCRIPTS[script]
    ids = greedy.ids(prompt, LENGTH)
    assert re.search(characters, greedy.decode(ids)), "the model does not write this script"
    assert ends_inside_a_character(greedy, ids), "every token is a character"

    events, text = stream_and_whole(sdk, prompt, max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    assert text == greedy.decode(ids)
    assert len(numbers(events)) > LENGTH / 4
    assert all(REPLACEMENT not in event.text for event in events[:-2] if isinstance(event, TextDelta))

    body = {"text_input": prompt, "max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    status, answer = post(smol, {**body, "exclude_input_in_output": True})
    assert (status, json.loads(answer)["text_output"]) == (200, text)
    status, answer = post(smol, {**body, "stream": True}, "generate_stream")
    assert (status, "".join(event["text_output"] for event in sse(answer))) == (200, text)


@pytest.mark.parametrize("script", SCRIPTS)
def test_stop_by_max_tokens_inside_a_character(sdk: OrcaClient, greedy: Greedy, script: str) -> None:
    prompt, _ = SCRIPTS[script]
    cut = ends_inside_a_character(greedy, greedy.ids(prompt, LENGTH))[-1]
    events, text = stream_and_whole(sdk, prompt, max_tokens=cut, temperature=0.0, ignore_eos=True)
    assert text == greedy.decode(greedy.ids(prompt, LENGTH)[:cut])
    assert text.endswith(REPLACEMENT)
    assert events[-1].finish_reason == "length"


def test_sampled_text(sdk: OrcaClient) -> None:
    """The same seed is the same text, streamed or not."""
    texts = {stream_and_whole(sdk, SCRIPTS["chinese"][0], max_tokens=12, temperature=1.0, seed=s)[1] for s in (1, 2, 3)}
    assert len(texts) > 1
    assert re.search(SCRIPTS["chinese"][1], "".join(texts))


def stops(greedy: Greedy, prompt: str) -> Iterator[str]:
    """Stop strings in the model's text that begin inside one token and end inside a later one."""
    ids = greedy.ids(prompt, LENGTH)
    borders = [len(greedy.decode(ids[:n])) for n in range(len(ids)) if n not in ends_inside_a_character(greedy, ids)]
    text = greedy.decode(ids)
    for border in borders[4:]:
        stop = text[border - 1 : border + 2]
        if text.find(stop) == border - 1 and len(stop) == 3:
            yield stop


@pytest.mark.parametrize("prompt", [ENGLISH, SCRIPTS["chinese"][0], SCRIPTS["cyrillic"][0]])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(sdk: OrcaClient, greedy: Greedy, prompt: str, include: bool) -> None:
    ids = greedy.ids(prompt, LENGTH)
    text = greedy.decode(ids)
    stop = next(stops(greedy, prompt))
    inside = ends_inside_a_character(greedy, ids)  # a token may end one character and begin another
    needed = next(n for n in range(LENGTH) if n not in inside and stop in greedy.decode(ids[:n]))
    sampling = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, "include_stop_str_in_output": include}
    events, answer = stream_and_whole(sdk, prompt, stop=["never", stop], **sampling)
    assert answer == text[: text.index(stop) + (len(stop) if include else 0)]
    assert events[-1] == Finished("stop", len(greedy.encode(prompt)), needed)


def test_text_held_back_for_a_stop_string_that_does_not_come(sdk: OrcaClient, greedy: Greedy) -> None:
    text = greedy.decode(greedy.ids(ENGLISH, LENGTH))
    almost = text[-6:] + "never"
    events, answer = stream_and_whole(
        sdk, ENGLISH, max_tokens=LENGTH, temperature=0.0, ignore_eos=True, stop=[almost, text[2:9] + "never"]
    )
    assert answer == text
    assert events[-1].finish_reason == "length"


def test_slow_reader(sdk: OrcaClient, greedy: Greedy) -> None:
    prompt, _ = SCRIPTS["chinese"]
    events = []
    for event in sdk.stream(prompt, max_tokens=LENGTH, temperature=0.0, ignore_eos=True):
        events.append(event)
        time.sleep(0.2)
    assert joined(events) == greedy.decode(greedy.ids(prompt, LENGTH))
    assert events[-1].num_output_tokens == LENGTH


def test_tokens_that_cannot_be_sent_become_one_response(smol: TritonServer, sdk: OrcaClient, greedy: Greedy) -> None:
    """A server that stands still blocks every send; the engine goes on, and what piles up comes at once."""
    prompt, _ = SCRIPTS["cyrillic"]
    length = 4 * LENGTH  # so many that it cannot have ended when the server stops
    stream = sdk.stream(prompt, max_tokens=length, temperature=0.0, ignore_eos=True)
    events = [next(stream)]
    os.kill(smol.pid, signal.SIGSTOP)
    try:
        time.sleep(1.0)
    finally:
        os.kill(smol.pid, signal.SIGCONT)
    events += stream
    assert max(numbers(events)) > 4
    assert joined(events) == greedy.decode(greedy.ids(prompt, length))
