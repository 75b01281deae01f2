"""A tiny engine process that speaks the real channel, so that supervision can be tested without a model.

Its first argument says how it behaves: `echo` answers a request with its own prompt, one token per report; `hold`
answers nothing until it is cancelled; `describe` ends a request with an error that is the request as JSON; `crash`
kills itself at the first request; `refuse` cannot start; `exit` ends with code 3 before it is ready; `mute` never gets
ready; `once` echoes, but only the first process becomes ready.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from orca_backend.channel import (
    Cancel,
    Channel,
    EngineInfo,
    Heartbeat,
    IterationReport,
    Occupancy,
    Ready,
    Shutdown,
    StartFailed,
    Submit,
)
from orca_backend.config import EngineConfig
from orca_backend.request import Request, TokenEvent

HEARTBEAT_SECONDS = 0.25


def info(config: EngineConfig) -> EngineInfo:
    """An engine that has room for 64 tokens per request."""
    return EngineInfo(
        model_name="scripted",
        architecture=os.environ.get("OMP_WAIT_POLICY", ""),  # for a test of the environment
        dtype="none",
        device="none",
        policy=config.scheduler.policy,
        max_model_len=config.limits.max_model_len or 64,
        max_bs=4,
        n_workers=1,
        n_slots=256,
        block_size=16,
        vocab_size=320,
        weight_bytes=0,
        kv_bytes=0,
        load_seconds=0.0,
        pid=os.getpid(),
    )


def echo(channel: Channel, request: Request) -> None:
    """The prompt's tokens, one report each; "stop" if the last of them is a stop token."""
    ids = request.prompt_ids[: request.max_new_tokens]
    for position, token_id in enumerate(ids):
        reason = None
        if token_id in request.stop_token_ids:
            reason = "stop"
        elif position == len(ids) - 1:
            reason = "length"
        event = TokenEvent(request_id=request.request_id, token_ids=[token_id], finish_reason=reason)
        channel.send(IterationReport(iteration_id=position, num_rows=1, num_tokens=1, events=[event]))
        if reason:
            return


def main() -> int:
    """Behave as told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    assert arguments.parent == os.getppid()
    channel = Channel.from_fd(arguments.fd)
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    if arguments.mode == "mute":
        time.sleep(60)
    if arguments.mode == "exit":
        return 3
    if arguments.mode == "silent":
        signal.signal(signal.SIGUSR1, lambda *_: Path(config.model, "recorded").touch())
        channel.send(Ready(info(config)))
        time.sleep(60)
    mark = Path(config.model, "started")
    if arguments.mode == "refuse" or (arguments.mode == "once" and mark.exists()):
        channel.send(StartFailed("no such model"))
        return 1
    if arguments.mode == "once":
        mark.touch()
    channel.send(Ready(info(config)))
    held: set[int] = set()
    while True:
        if not channel.wait(HEARTBEAT_SECONDS):
            channel.send(Heartbeat(Occupancy(running=len(held), slots_total=256)))
            continue
        try:
            message = channel.receive()
        except EOFError:
            return 0
        if isinstance(message, Shutdown):
            return 0
        if isinstance(message, Submit) and arguments.mode == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(message, Submit) and arguments.mode == "hold":
            held.add(message.request.request_id)
        elif isinstance(message, Submit) and arguments.mode == "describe":
            described = msgspec.json.encode(message.request).decode()
            request_id = message.request.request_id
            event = TokenEvent(request_id=request_id, finish_reason="error", code="INTERNAL", message=described)
            channel.send(IterationReport(events=[event]))
        elif isinstance(message, Submit):
            echo(channel, message.request)
        elif isinstance(message, Cancel):
            held.discard(message.request_id)
        channel.send(Heartbeat(Occupancy(running=len(held), slots_total=256)))


if __name__ == "__main__":
    sys.exit(main())
