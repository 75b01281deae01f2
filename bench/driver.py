"""Runs sequences on a model in this process, as the engine's worker is told to, and takes the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.model import Model
from bench.peers.workload import Request
from bench.work import Work, row_work
from orca_backend.models.spec import ModelSpec
from orca_backend.request import SamplerSettings
from orca_backend.scheduler.iteration import IterationBatch, JoiningSequence, Row


@dataclass
class Run:
    """What was done: seconds, tokens, iterations, seconds by kind of operation, and how much work it was."""

    seconds: float = 0.0
    tokens: int = 0
    iterations: int = 0
    operations: dict[str, float] = field(default_factory=dict)
    work: Work = field(default_factory=Work)


class Driver:
    """Greedy sequences on one model. A forward pass and a round of sampling per iteration; no scheduler."""

    def __init__(self, model: Model, spec: ModelSpec) -> None:
        """Take over the model; its program must be a compiled one."""
        self._model = model
        self._spec = spec
        self._kv_bytes_per_token = model.info.kv_bytes // model.info.n_slots
        self._weight_bytes = model.info.weight_bytes

    def prefill(self, requests: list[Request]) -> Run:
        """Prompt after prompt, each in an iteration of its own."""
        return self._measure(self._prompts(requests))[0]

    def decode(self, requests: list[Request]) -> Run:
        """Prompts first, which do not count; then in every iteration one token of every request.

        All requests decode for as long as the first one asks.
        """
        _, tokens = self._measure(self._prompts(requests))
        total = Run()
        for step in range(requests[0].max_new_tokens):
            rows = [Row(i, len(request.prompt_ids) + step, 1) for i, request in enumerate(requests)]
            batch = IterationBatch(iteration_id=step, rows=rows, token_ids=tokens)
            run, tokens = self._measure(iter([batch]))
            _accumulate(total, run)
        return total

    def _prompts(self, requests: list[Request]) -> Iterator[IterationBatch]:
        first = 0
        for i, request in enumerate(requests):
            last = first - (-(len(request.prompt_ids) + request.max_new_tokens) // self._model.info.block_size)
            sequence = JoiningSequence(
                request_id=i,
                prompt_ids=request.prompt_ids,
                block_ids=list(range(first, last)),
                stop_token_ids=[],
                sampling=SamplerSettings(),
            )
            rows = [Row(i, 0, len(request.prompt_ids))]
            yield IterationBatch(iteration_id=i, rows=rows, token_ids=request.prompt_ids, joining=[sequence])
            first = last

    def _measure(self, batches: Iterator[IterationBatch]) -> tuple[Run, list[int]]:
        """Run; also the tokens that were sampled, in order."""
        run, sampled = Run(), []
        before = self._model.seconds()
        for batch in batches:
            started = time.perf_counter()
            result = self._model.runner.run(batch)
            run.seconds += time.perf_counter() - started
            run.iterations += 1
            run.tokens += len(batch.token_ids)
            run.work += Work(bytes_read=self._weight_bytes)
            for row in batch.rows:
                run.work += row_work(
                    self._spec, row.start, row.num_tokens, sampled=1, kv_bytes_per_token=self._kv_bytes_per_token
                )
            sampled += result.sampled
        run.operations = {name: seconds - before[name] for name, seconds in self._model.seconds().items()}
        return run, sampled


def _accumulate(total: Run, run: Run) -> None:
    total.seconds += run.seconds
    total.tokens += run.tokens
    total.iterations += run.iterations
    total.work += run.work
    total.operations = {name: total.operations.get(name, 0.0) + seconds for name, seconds in run.operations.items()}
