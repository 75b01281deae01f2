"""Draw what policies do with the same few requests, on the real engine: the pictures of docs/timelines.md.

    python -m bench.timelines

Memory and batches are small, so that a dozen requests show what the policies differ in.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.engine_process import EngineProcess
from bench.peers.environments import ROOT
from orca_backend.config import POLICIES, EngineConfig
from orca_backend.timeline.engines import record
from orca_backend.timeline.picture import draw
from orca_backend.timeline.recording import Flight, read

# Prompt tokens, generated tokens, and how many iterations later it comes.
REQUESTS = ((6, 9, 0), (10, 4, 0), (4, 12, 1), (14, 6, 1), (30, 5, 2), (5, 9, 1), (8, 3, 3), (6, 11, 0), (26, 4, 1))
SHOWN = ("static_fair", "orca", "vllm", "sarathi")
LIMIT = 40  # tokens of prompt and output: what is reserved where a policy reserves the limit


def record_policy(policy: str, model: Path, directory: str) -> Flight:
    """Run the requests, and read what the engine recorded."""
    scheduler = {"policy": policy, "max_bs": 4}
    if POLICIES[policy].selection == "token_budget":
        scheduler["token_budget"] = 12
    settings = {
        "model": str(model),
        "scheduler": scheduler,
        "kv_cache": {"n_slots": 96},
        "limits": {"max_model_len": LIMIT},
        "recorder": {"path": directory},
    }
    config = msgspec.convert(settings, EngineConfig)
    with EngineProcess(config) as engine:
        for prompt, output, later in REQUESTS:
            seen = len(engine.reports)
            while len(engine.reports) < seen + later:
                engine.receive()
            engine.submit([100 + prompt] * prompt, output)
        engine.finish()
        return read(record(engine.process.pid, config.recorder, timeout=60))


def main() -> int:
    """One picture for each policy."""
    parser = argparse.ArgumentParser(prog="bench.timelines", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=SHOWN)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "timelines", help="directory for the pictures")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for policy in arguments.policies:
            flight = record_policy(policy, arguments.model, directory)
            draw(flight, flight.iterations, arguments.output / f"{policy}.png")
            print(f"{policy}: {len(flight.iterations)} iterations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
