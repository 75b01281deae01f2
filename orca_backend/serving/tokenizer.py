"""Text to token ids and back, and chats to text, as the checkpoint's own files say.

Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja, generation_config.json and
config.json of a checkpoint directory. One object per thread: `tokenizers` objects are not safe to share.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplateError(ValueError):
    """The chat cannot be rendered: there is no template, or the template refuses it."""


class Tokenizer:
    """The tokenizer of the checkpoint in `directory`. Raises OSError or ValueError if its files cannot be read."""

    def __init__(self, directory: str | Path) -> None:
        """Load; the chat template is compiled at its first use."""
        self._directory = Path(directory)
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; is this a directory made by `orca import-model`?")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()  # a tokenizer.json may carry both; setting them per call is not thread-safe
        self._tokenizer.no_padding()
        # In bytes; None where a normalizer may make text shorter before it is tokenized.
        self._longest: int | None = None
        if self._tokenizer.normalizer is None:
            self._longest = max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))
        self._config = self._read_json("tokenizer_config.json")
        special = {**self._read_json("special_tokens_map.json"), **self._config}
        self.special_tokens: dict[str, str] = {
            name: value["content"] if isinstance(value, dict) else value
            for name in _SPECIAL
            if (value := special.get(name))
        }
        self.eos_token_ids: list[int] = self._eos_token_ids()
        self._template: jinja2.Template | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with the special tokens that the checkpoint puts around a prompt unless told not to."""
        # encode() would keep every other thread of the process waiting: only the batch form lets go of the GIL.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`, without tokenizing it: no token stands for more than the longest."""
        return 0 if self._longest is None else len(text.encode()) // self._longest

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for `messages`, ending where the assistant's answer begins. Encode it without special tokens.

        Raises ChatTemplateError.
        """
        if self._template is None:
            self._template = self._compile_template()
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self.special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {error}") from error

    def _compile_template(self) -> jinja2.Template:
        """Compile in the environment that transformers gives to templates: sandboxed, blocks trimmed."""

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # jinja2's own escapes HTML

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self._template_source())
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

    def _template_source(self) -> str:
        """The template: a file of its own, or inside tokenizer_config.json (one, or several with names)."""
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
        if not template:
            raise ChatTemplateError("the model has no chat template; send the prompt as plain text")
        return str(template)

    def _eos_token_ids(self) -> list[int]:
        """The ids that end a generation: generation_config.json first, as transformers has it."""
        for name in ("generation_config.json", "config.json"):
            ids = self._read_json(name).get("eos_token_id")
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
        token_id = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        return [] if token_id is None else [token_id]

    def _read_json(self, name: str) -> dict[str, Any]:
        """A JSON object of the checkpoint; an absent file is an empty one."""
        path = self._directory / name
        if not path.is_file():
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
