"""OpenVINO GenAI's continuous batching pipeline. Needs an IR made by optimum-intel (see `convert_command`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Answers, Request, serve

_BLOCK = 32  # tokens of a K/V block of its CPU plugin


class OpenVino:
    """`options["scheduler"]` sets fields of its SchedulerConfig, `options["properties"]` the plugin's properties."""

    def load(self, model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Compile the IR."""
        scheduler = openvino_genai.SchedulerConfig()
        blocks = -(-options["max_tokens"] // _BLOCK) + 1
        settings = {
            "max_num_seqs": options["max_running"],
            "max_num_batched_tokens": 256,
            "num_kv_blocks": options["max_running"] * blocks,
            "enable_prefix_caching": False,
            "dynamic_split_fuse": True,
        } | options.get("scheduler", {})
        for name, value in settings.items():
            setattr(scheduler, name, value)
        properties = {
            "INFERENCE_NUM_THREADS": options["threads"],
            "INFERENCE_PRECISION_HINT": {"bf16": "bf16", "fp32": "f32"}[options["dtype"]],
        } | options.get("properties", {})
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._requests = 0
        return {"version": openvino_genai.__version__, "scheduler": settings, "properties": properties}

    def run(self, requests: list[Request]) -> Answers:
        """Add what is due and step, until nothing is left."""
        answers = Answers(requests)
        handles: dict[int, Any] = {}
        while True:
            for i, request in answers.due(wait=not self._pipeline.has_non_finished_requests()):
                handles[i] = self._add(request)
            if not self._pipeline.has_non_finished_requests():
                return answers
            self._pipeline.step()
            for i, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        answers.add(i, list(output.generated_ids))

    def _add(self, request: Request) -> Any:
        """Submit one request; the handle to read its tokens from."""
        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.max_new_tokens = request.max_new_tokens
        prompt = openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        self._requests += 1
        return self._pipeline.add_request(self._requests, prompt, config)


if __name__ == "__main__":
    serve(OpenVino())
