"""vLLM's CPU build, its engine in this process and compiled by inductor (vLLM's default)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import vllm
from protocol import Answers, Request, serve
from vllm import EngineArgs, LLMEngine, SamplingParams

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Vllm:
    """`options["engine"]` sets any of its EngineArgs."""

    def load(self, model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Load and compile."""
        if options["weights"] != "none":
            raise ValueError("vLLM's CPU build reads int8 weights from quantized checkpoints only")
        cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        settings = {
            "model": str(model),
            "dtype": _DTYPES[options["dtype"]],
            "max_num_seqs": options["max_running"],
            "max_model_len": options["max_tokens"],
            "enable_prefix_caching": False,
        } | options.get("engine", {})
        self._engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        self._requests = 0
        return {"version": vllm.__version__, "engine": settings}

    def run(self, requests: list[Request]) -> Answers:
        """Add what is due and step, until nothing is left."""
        engine = self._engine
        answers = Answers(requests)
        index: dict[str, int] = {}
        while True:
            for i, request in answers.due(wait=not engine.has_unfinished_requests()):
                index[self._add(request)] = i
            if not engine.has_unfinished_requests():
                return answers
            for output in engine.step():
                i = index[output.request_id]
                answers.add(i, list(output.outputs[0].token_ids[len(answers.token_ids[i]) :]))

    def _add(self, request: Request) -> str:
        """Submit one request; its name."""
        self._requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=request.max_new_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._requests), {"prompt_token_ids": request.prompt_ids}, sampling)
        return str(self._requests)


if __name__ == "__main__":
    serve(Vllm())
