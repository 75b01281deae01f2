"""The flight recorder: what a real engine did is what its recordings say, on request, on failure, and bounded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.engine_process import EngineProcess
from orca_backend.channel import Cancel, Heartbeat
from orca_backend.config import EngineConfig, KVCacheConfig, RecorderConfig, SchedulerConfig
from orca_backend.engine.recorder import Recorder
from orca_backend.request import Request, TokenEvent
from orca_backend.scheduler.iteration import IterationBatch, Occupancy, Row
from orca_backend.timeline.engines import find_engines, record
from orca_backend.timeline.recording import read, recording_path


def config(checkpoint: Path, directory: Path, *, capacity: int = 4096, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        dtype="float32",
        threads=1,
        scheduler=SchedulerConfig(**scheduler),
        kv_cache=KVCacheConfig(n_slots=256),
        recorder=RecorderConfig(path=str(directory), capacity=capacity),
    )


def test_a_recording_says_what_the_engine_did(tiny_llama: Path, tmp_path: Path) -> None:
    with EngineProcess(config(tiny_llama, tmp_path, max_bs=2)) as engine:
        lengths = {engine.submit([5] * n, m): (n, m) for n, m in ((7, 110), (20, 90), (3, 6))}
        engine.finish()
        flight = read(record(engine.process.pid, find_engines()[engine.process.pid], timeout=30))
        reports = engine.reports
    assert (flight.recording.policy, flight.recording.pid) == ("orca", engine.process.pid)
    assert {r.id: (r.prompt_tokens, r.max_new_tokens, r.end) for r in flight.requests.values()} == {
        i: (n, m, "length") for i, (n, m) in lengths.items()
    }
    assert [record.id for record in flight.iterations] == [report.iteration_id for report in reports]
    for written, report in zip(flight.iterations, reports, strict=True):
        assert len(written.rows) == report.num_rows <= 2
        assert written.prefill_tokens + written.decode_tokens == report.num_tokens
        assert (written.run_seconds, written.schedule_seconds) == (report.run_seconds, report.schedule_seconds)
        assert (written.slots_reserved, written.waiting) == (report.occupancy.slots_reserved, report.occupancy.waiting)
        assert written.joined == report.joined
        assert written.left == [event.request_id for event in report.events if event.finish_reason]
        assert written.scheduled <= written.returned
    assert sum(written.prefill_tokens for written in flight.iterations) == 7 + 20 + 3
    assert sorted(i for written in flight.iterations for i in written.joined) == sorted(lengths)
    assert any(written.waiting == 1 and len(written.rows) == 2 for written in flight.iterations)  # two at once


def test_preempted_and_cancelled_requests(tiny_llama: Path, tmp_path: Path) -> None:
    settings = config(tiny_llama, tmp_path, policy="vllm", max_bs=8)
    with EngineProcess(settings) as engine:
        for i in range(4):
            engine.submit([5 + i] * 40, 60)  # 4 * 100 tokens do not fit into 256 slots, their prompts do
        cancelled = engine.submit([9], 50)
        engine.cancel(cancelled)
        stopped = engine.submit([9], 50)
        engine.channel.send(Cancel(stopped, "stop"))  # the stub has found a stop string
        engine.finish()
        flight = read(record(engine.process.pid, find_engines()[engine.process.pid], timeout=30))
    preempted = [i for written in flight.iterations for i in written.preempted]
    assert len(preempted) == engine.occupancy.preemptions > 0
    assert (flight.requests[cancelled].end, flight.requests[stopped].end) == ("cancelled", "stop")
    joined = [i for written in flight.iterations for i in written.joined]
    assert sorted(joined) == sorted([*preempted, *(i for i, r in flight.requests.items() if i in joined)])
    left = [i for written in flight.iterations for i in written.left]
    assert len(left) == len(set(left))
    assert set(left) >= set(flight.requests) - {cancelled, stopped}


def test_an_engine_that_dies_of_an_error_leaves_a_recording(tiny_llama: Path, tmp_path: Path) -> None:
    with EngineProcess(config(tiny_llama, tmp_path)) as engine:
        engine.submit([5], 3)
        engine.finish()
        engine.channel.send(Heartbeat(Occupancy()))  # nothing that an engine could be told
        assert engine.process.wait(30) == 1
        flight = read(recording_path(tmp_path, engine.process.pid, failure=True))
    assert flight.recording.reason == "of a failure: TypeError: not a message for the engine: Heartbeat"
    assert len(flight.iterations) == 3


def keep(recorder: Recorder, iteration_id: int, request_ids: list[int], *, left: list[int], failed: str = "") -> None:
    """One iteration that decoded these requests."""
    rows = [Row(request_id, 5, 1) for request_id in request_ids]
    batch = IterationBatch(iteration_id=iteration_id, rows=rows, token_ids=[0] * len(rows))
    recorder.told([TokenEvent(request_id=i, finish_reason="stop" if i in left else None) for i in request_ids])
    recorder.returned(batch, scheduled=0.0, schedule_seconds=0.0, run_seconds=0.0, occupancy=Occupancy(), failed=failed)


def test_memory_is_bounded_and_no_request_of_the_ring_is_forgotten(tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(path=str(tmp_path), capacity=10), model="m", policy="orca")
    old = Request(request_id=0, prompt_ids=[1] * 7, max_new_tokens=9)
    recorder.arrived(old)
    for i in range(1, 501):  # each of them takes part in two iterations
        recorder.arrived(Request(request_id=i, prompt_ids=[1], max_new_tokens=2))
        keep(recorder, i, [0, i - 1, i] if i > 1 else [0, i], left=[i - 1] if i > 1 else [])
    recorder.write()
    flight = read(recording_path(tmp_path, os.getpid()))
    assert [written.id for written in flight.iterations] == list(range(491, 501))
    assert set(flight.requests) == {0, *range(490, 501)}
    assert flight.requests[0].prompt_tokens == 7
    assert {row.request_id for written in flight.iterations for row in written.rows} == set(flight.requests)


def test_requests_that_are_refused_while_no_iteration_returns_are_forgotten(tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(path=str(tmp_path), capacity=10), model="m", policy="orca")
    for i in range(2):
        recorder.arrived(Request(request_id=i, prompt_ids=[1], max_new_tokens=9))
    keep(recorder, 1, [0, 1], left=[])
    recorder.told([TokenEvent(request_id=0, finish_reason="cancelled")])
    for i in range(2, 500):
        recorder.arrived(Request(request_id=i, prompt_ids=[1], max_new_tokens=9))
        recorder.told([TokenEvent(request_id=i, finish_reason="error", code="UNAVAILABLE")])
    recorder.write()
    flight = read(recording_path(tmp_path, os.getpid()))
    assert {0, 1} <= set(flight.requests)
    assert len(flight.requests) < 25


def test_failures_are_written_once_for_as_long_as_the_ring_shows_them(tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(path=str(tmp_path), capacity=10), model="m", policy="orca")
    path = recording_path(tmp_path, os.getpid(), failure=True)
    for i, failed in enumerate(["", "first", "second", *[""] * 8, "third"]):
        keep(recorder, i, [1], left=[], failed=failed)
        if failed:
            flight = read(path)
            written = "first" if i < 10 else "third"
            assert flight.recording.reason == f"of a failure: {written}"
            assert written in [record.failed for record in flight.iterations]


def test_a_place_that_cannot_be_written_to_harms_nobody(tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(path=str(tmp_path / "missing")), model="m", policy="orca")
    keep(recorder, 1, [1], left=[], failed="boom")
    recorder.write()


def test_a_recorder_without_capacity_keeps_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with EngineProcess(config(tiny_llama, tmp_path, capacity=0)) as engine:
        engine.submit([5], 3)
        engine.finish()
        with pytest.raises(RuntimeError, match=r"recorder\.capacity is 0"):
            record(engine.process.pid, find_engines()[engine.process.pid], timeout=1)
