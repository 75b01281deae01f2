"""The text of a stream is the text of the whole, whatever the tokens and however they arrive."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from orca_backend.serving.detokenizer import Detokenizer
from orca_backend.serving.tokenizer import Tokenizer

TEXT = "Привет, мир! 聪明的🧑‍🚀 naïve café 👩‍👩‍👧‍👦\n\n  two  spaces\tЖ 𝔘𝔫𝔦 end"
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@lru_cache
def load(path: Path) -> Tokenizer:
    return Tokenizer(path)


@pytest.fixture
def tokenizer(smollm2: Path) -> Tokenizer:
    return load(smollm2)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What is released for each token, and at the end."""
    released = []
    for token_id in ids:
        released.append(detokenizer.append(token_id))
        if detokenizer.stopped:
            break
    return [*released, detokenizer.finish()]


@SETTINGS
@given(ids=st.lists(st.integers(0, 49151), max_size=40), prompt=st.text(max_size=8), skip=st.booleans())
def test_random_tokens_join_to_the_decoded_whole(tokenizer: Tokenizer, ids: list[int], prompt: str, skip: bool) -> None:
    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=skip)

    released = pieces(Detokenizer(decode, tokenizer.encode(prompt), []), ids)
    assert "".join(released) == decode(ids)


@SETTINGS
@given(text=st.text(min_size=1, max_size=30), prompt=st.sampled_from(["", "聪", "the 🧑‍🚀", "\ufffd"]))
def test_no_replacement_character_that_the_model_did_not_make(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    ids = tokenizer.encode(text)
    assume(tokenizer.decode(ids) == text)  # SmolLM2's vocabulary lacks some bytes
    released = pieces(Detokenizer(tokenizer.decode, tokenizer.encode(prompt), []), ids)
    assert "".join(released) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in released)


def test_emoji_chinese_and_cyrillic_come_in_whole_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT) / 2
    released = pieces(Detokenizer(tokenizer.decode, [], []), ids)
    assert "".join(released) == TEXT
    assert sum(bool(piece) for piece in released) > 20  # not all at the end


def test_incomplete_end_is_replaced_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🧑")[:-1]
    assert len(ids) >= 2
    released = pieces(Detokenizer(tokenizer.decode, tokenizer.encode("so: "), []), ids)
    assert released[:-1] == [""] * len(ids)
    assert set(released[-1]) == {"\ufffd"}


def expected(text: str, stop: list[str], include: bool) -> str:
    """The specification: cut at the stop string that is complete first (then: that begins first, that is shortest)."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end if include else end - max(len(s) for s in found)]
    return text


@SETTINGS
@given(
    text=st.text(alphabet="ab聪\n ", max_size=24),
    stop=st.lists(st.text(alphabet="ab聪\n ", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_against_their_specification(
    tiny_tokenizer: Tokenizer, text: str, stop: list[str], include: bool
) -> None:
    """A token is a byte here, so text grows by one character and the specification can be exact."""
    detokenizer = Detokenizer(tiny_tokenizer.decode, [], stop, include_stop=include)
    released = pieces(detokenizer, tiny_tokenizer.encode(text))
    assert "".join(released) == expected(text, stop, include)
    assert detokenizer.stopped == any(s in text for s in stop)


@pytest.fixture
def tiny_tokenizer(tiny_llama: Path) -> Tokenizer:
    return load(tiny_llama)


def test_stop_string_across_tokens_never_leaks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One two three four")
    detokenizer = Detokenizer(tokenizer.decode, [], ["two three"])
    assert "".join(pieces(detokenizer, ids)) == "One "
    assert detokenizer.num_tokens == 3
    assert detokenizer.stopped


def test_stop_string_inside_one_token_cuts_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("A wonderful day")
    for include, text in ((False, "A won"), (True, "A wonder")):
        assert "".join(pieces(Detokenizer(tokenizer.decode, [], ["der"], include_stop=include), ids)) == text


def test_stop_string_in_the_prompt_does_not_stop(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("Count: one, END"), tokenizer.encode("ING two")
    assert "".join(pieces(Detokenizer(tokenizer.decode, prompt, ["END", "ENDING", "DING"]), ids)) == "ING two"


def test_stop_string_counts_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("stop go stop go")
    assert len(ids) == 4
    for min_tokens, text in ((0, ""), (1, "stop go "), (2, "stop go "), (3, "stop go stop go")):
        detokenizer = Detokenizer(tokenizer.decode, [], ["stop"], min_tokens=min_tokens)
        assert "".join(pieces(detokenizer, ids)) == text, min_tokens


def test_what_cannot_become_a_stop_string_is_released(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.decode, [], ["xyz"])
    released = [detokenizer.append(token_id) for token_id in tokenizer.encode("Hello there")]
    assert "".join(released) == "Hello the"
    assert detokenizer.finish() == "re"
