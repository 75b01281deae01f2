"""Real text of exactly so many tokens, as the server's tokenizer counts them.

The text is the language reference that comes with every Python: English prose with some code, 65,000 words.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from orca_backend.serving.tokenizer import Tokenizer

_ATTEMPTS = 200  # pieces that are tried; most are right at once, only those cut inside a character or a word may not be


@cache
def texts_of(checkpoint: Path) -> TextSource:
    """The source for the tokenizer of a checkpoint, made once."""
    return TextSource(Tokenizer(checkpoint))


class TextSource:
    """Pieces of the text, drawn at random."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Tokenize the whole once."""
        self._tokenizer = tokenizer
        text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
        self._ids = tokenizer.encode(text, add_special_tokens=False)
        self._special = len(tokenizer.encode("")) - len(tokenizer.encode("", add_special_tokens=False))

    def draw(self, num_tokens: int, rng: random.Random, *, after: str = "", special_tokens: bool = True) -> str:
        """A piece that makes `after`, followed by it, `num_tokens` long, with the special tokens around a prompt.

        Raises ValueError if there is none: for fewer than one token, or more than the text has.
        """
        before = len(self._count(after, special_tokens)) if after else self._special * special_tokens
        wanted = num_tokens - before
        if not 1 <= wanted <= len(self._ids):
            raise ValueError(f"no text of {wanted} tokens: at least 1, at most {len(self._ids)}")
        for _ in range(_ATTEMPTS):
            start = rng.randrange(len(self._ids) - wanted + 1)
            text = self._tokenizer.decode(self._ids[start : start + wanted])
            if len(self._count(after + text, special_tokens)) == num_tokens:
                return text
        raise ValueError(f"no text of {wanted} tokens after {after[-20:]!r} was found in {_ATTEMPTS} attempts")

    def _count(self, text: str, special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens)
