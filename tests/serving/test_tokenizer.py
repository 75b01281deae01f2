"""Our reading of a checkpoint's tokenizer files against that of transformers."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from orca_backend.serving.tokenizer import ChatTemplateError, Tokenizer

TEXTS = ["Hello, world!", " leading", "聪明的🧑‍🚀 Ж", "a<|im_end|>b", "x\x00y", "   ", "\n\n"]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <there> & 'you'"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Привет"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ],
]


@pytest.fixture(scope="module")
def tokenizers(smollm2: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer(smollm2), AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_as_transformers(tokenizers: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = tokenizers
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("chat", CHATS)
def test_chat_as_transformers(tokenizers: tuple[Tokenizer, Any], chat: list[dict[str, Any]]) -> None:
    ours, theirs = tokenizers
    rendered = ours.render_chat(chat)
    assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.encode(rendered, add_special_tokens=False) == theirs(rendered, add_special_tokens=False)["input_ids"]


def test_end_of_sequence(tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, theirs = tokenizers
    assert theirs.eos_token_id in ours.eos_token_ids
    assert ours.decode(ours.eos_token_ids) == ""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "is broken"),
        ("{{ messages.clear() }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}", "refuses"),
    ],
)
def test_templates_that_refuse_or_must_be_refused(smollm2: Path, tmp_path: Path, template: str, reason: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ChatTemplateError, match=reason):
        Tokenizer(tmp_path).render_chat(CHATS[0])


def test_no_template(tiny_llama: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(tiny_llama).render_chat(CHATS[0])


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_the_lower_bound_of_tokens_holds(tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, _ = tokenizers
    for text in [*TEXTS, "7" * 500, " " * 500, "聪" * 200, "word " * 300]:
        assert ours.fewest_tokens(text) <= len(ours.encode(text))
    assert ours.fewest_tokens("7" * 2_000_000) > 8192


def test_other_threads_go_on_while_a_long_prompt_is_tokenized(tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, _ = tokenizers
    encoding = threading.Thread(target=ours.encode, args=("7" * 400_000,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 20  # with the GIL held it would be one or two


def test_a_chat_that_is_nested_too_deeply_is_refused(smollm2: Path, tmp_path: Path) -> None:
    """A template may print whatever a message holds, and json.dumps has its own limit of depth."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}")
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="refuses the messages"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "a", "more": deep}])
