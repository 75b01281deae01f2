"""The oracle for greedy text: transformers, which the product does not import."""

from __future__ import annotations

import functools
from pathlib import Path

import tokenizers
import torch
import transformers


class Greedy:
    """What SmolLM2 says greedily in float32, by transformers: token ids, and their text."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.ids = functools.cache(self._ids)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _ids(self, prompt: str, max_tokens: int) -> list[int]:
        """`max_tokens` token ids after `prompt`, past the end of the sequence if it ends before."""
        input_ids = torch.tensor([self.encode(prompt)])
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, input_ids.shape[1] :].tolist()
