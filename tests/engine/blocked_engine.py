"""An engine process whose every iteration lasts until a line comes on standard input: `blocked_engine.py FD TIMEOUT`.

TIMEOUT is the engine's iteration_timeout. An iteration that gets the line "fail" fails.
"""

from __future__ import annotations

import sys

from orca_backend.channel import Channel
from orca_backend.config import RecorderConfig, SchedulerConfig
from orca_backend.engine.engine import Engine
from orca_backend.engine.recorder import Recorder
from orca_backend.scheduler.iteration import IterationBatch, IterationResult
from orca_backend.scheduler.policies import make_scheduler


class BlockedRunner:
    """Says when an iteration runs, and returns when it may."""

    def run(self, batch: IterationBatch) -> IterationResult:
        print("running", flush=True)
        if sys.stdin.readline() == "fail\n":
            raise RuntimeError("as it was told")
        return IterationResult(iteration_id=batch.iteration_id, sampled=[7] * len(batch.rows))


if __name__ == "__main__":
    scheduler = make_scheduler(
        SchedulerConfig(max_bs=1, max_queue_seconds=0.2), n_slots=64, block_size=16, max_model_len=64
    )
    recorder = Recorder(RecorderConfig(capacity=0), model="none", policy="orca")
    channel, timeout = Channel.from_fd(int(sys.argv[1])), float(sys.argv[2])
    Engine(channel, scheduler, BlockedRunner(), 100, recorder, iteration_timeout=timeout).run()
