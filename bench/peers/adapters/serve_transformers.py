"""Hugging Face transformers: static batches, padded on the left, each until its last member ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from protocol import Answers, Request, serve
from transformers import AutoModelForCausalLM, StoppingCriteria

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class _Watch(StoppingCriteria):
    """Notes every step's tokens of the members that still want some."""

    def __init__(self, answers: Answers, first: int, limits: list[int]) -> None:
        self._answers = answers
        self._first = first
        self._limits = limits

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for i, token in enumerate(input_ids[:, -1].tolist()):
            if len(self._answers.token_ids[self._first + i]) < self._limits[i]:
                self._answers.add(self._first + i, [token])
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """`generate` on as many requests as may run, in order of arrival."""

    def load(self, model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Load the weights."""
        if options["weights"] != "none":
            raise ValueError("transformers has no int8 weights for CPUs of its own")
        torch.set_num_threads(options["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=_DTYPES[options["dtype"]])
        self._model.generation_config.eos_token_id = None
        self._max_running = options["max_running"]
        return {"version": transformers.__version__, "attention": self._model.config._attn_implementation}

    def run(self, requests: list[Request]) -> Answers:
        """Batch after batch."""
        answers = Answers(requests)
        for first in range(0, len(requests), self._max_running):
            batch = requests[first : first + self._max_running]
            longest = max(len(request.prompt_ids) for request in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for i, request in enumerate(batch):
                ids[i, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
                mask[i, longest - len(request.prompt_ids) :] = 1
            limits = [request.max_new_tokens for request in batch]
            watch = _Watch(answers, first, limits)
            self._model.generate(
                ids, attention_mask=mask, max_new_tokens=max(limits), do_sample=False, stopping_criteria=[watch]
            )
        return answers


if __name__ == "__main__":
    serve(Transformers())
