"""The engine around one model, in this process: the real scheduler, schedule-ahead and GPU runner, timed step by step.

What of the engine is missing here is its channel to the serving side and the thread around the runner.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from dataclasses import dataclass

import torch

from orca_backend.config import SchedulerConfig
from orca_backend.engine import memory_profile
from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.device import Device
from orca_backend.engine.gpu_runner import MAX_PASS_TOKENS, GpuRunner, Pending
from orca_backend.engine.lookahead import Lookahead
from orca_backend.engine.sequence_table import SequenceTable
from orca_backend.models.decoder import Decoder
from orca_backend.request import Request
from orca_backend.scheduler.iteration import IterationBatch
from orca_backend.scheduler.policies import make_scheduler


@dataclass(frozen=True)
class Step:
    """One turn of the loop: rows and tokens of the iteration that returned; seconds, and of them the host's own."""

    rows: int
    tokens: int
    seconds: float
    host: float


class EngineLoop:
    """Algorithm 1 with two iterations in flight. Requests are greedy and never stop early."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        dtype: torch.dtype,
        *,
        block_size: int,
        max_bs: int,
        max_model_len: int,
        n_slots: int | None = None,
    ) -> None:
        """Allocate and capture. `n_slots` of the K/V pool; None: all that the device has room for.

        Raises memory_profile.OutOfDeviceMemoryError if not even one sequence of `max_model_len` tokens fits.
        """
        spec = decoder.spec
        if n_slots is None:
            n_slots = memory_profile.count_slots(
                device.free_bytes(),
                memory_profile.measure_iteration(
                    device, decoder, dtype, block_size=block_size, max_tokens=MAX_PASS_TOKENS, max_bs=max_bs
                ),
                SequenceTable.num_bytes(max_bs, -(-max_model_len // block_size), spec.vocab_size),
                bytes_per_token=AttentionKV.bytes_per_token(spec, dtype),
                block_size=block_size,
                longest=max_model_len,
                wanted=None,
            )
        self.n_slots = n_slots
        self._block_size = block_size
        kv = AttentionKV(spec, n_slots, dtype, device.device, block_size=block_size)
        self._runner = GpuRunner(
            device,
            decoder,
            kv,
            block_size=block_size,
            max_bs=max_bs,
            max_sequences=max_bs,
            max_model_len=max_model_len,
            max_tokens=MAX_PASS_TOKENS,
        )
        config = SchedulerConfig(max_bs=max_bs)
        self._scheduler = Lookahead(
            make_scheduler(config, n_slots=n_slots, block_size=block_size, max_model_len=max_model_len)
        )
        self._in_flight: deque[tuple[IterationBatch, Pending]] = deque()
        self._ids = itertools.count()

    def holds(self, batch: int, tokens: int) -> bool:
        """Whether `batch` sequences of `tokens` tokens fit into the K/V pool together."""
        return batch * -(-tokens // self._block_size) * self._block_size <= self.n_slots

    def submit(self, batch: int, prompt: int, output: int) -> None:
        """`batch` requests with prompts of `prompt` tokens, which generate `output` tokens."""
        for _ in range(batch):
            request = Request(request_id=next(self._ids), prompt_ids=[7] * prompt, max_new_tokens=output)
            self._scheduler.submit(request, time.perf_counter())

    def step(self) -> Step:
        """Keep two iterations in flight, wait for the older one, and pass its tokens to the scheduler.

        Raises RuntimeError if one of its rows has failed.
        """
        started = time.perf_counter()
        while (batch := self._scheduler.schedule(time.perf_counter())) is not None:
            self._in_flight.append((batch, self._runner.launch(batch)))
        batch, pending = self._in_flight.popleft()
        waiting = time.perf_counter()
        result = pending.wait()
        waited = time.perf_counter() - waiting
        self._scheduler.update(result, time.perf_counter())
        if result.failed:
            raise RuntimeError(f"{len(result.failed)} rows failed: {next(iter(result.failed.values()))}")
        seconds = time.perf_counter() - started
        return Step(len(batch.rows), len(batch.token_ids), seconds, seconds - waited)

    def finish(self) -> list[Step]:
        """Steps until nobody has work."""
        steps = []
        while self._scheduler.has_work:
            steps.append(self.step())
        return steps

    def decode(self, batch: int, context: int, steps: int) -> list[Step]:
        """`steps` steady steps of a batch whose sequences have `context` tokens on average over them."""
        # One more of a decode iteration at each end: there the loop fills up and runs empty.
        self.submit(batch, context - steps // 2, steps + 3)
        return [step for step in self.finish() if step.tokens == batch][1:-1]

    def prefill(self, tokens: int, repeats: int) -> list[Step]:
        """One prompt after the other, each alone."""
        taken = []
        for _ in range(repeats):
            self.submit(1, tokens, 1)
            taken += self.finish()
        return taken


def median(steps: list[Step]) -> Step:
    """The step of the middle time, with the host's middle time."""
    middle = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
    return dataclasses.replace(middle, host=sorted(step.host for step in steps)[len(steps) // 2])
