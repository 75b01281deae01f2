"""Serving under measurement: latencies by hand, and the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.served import generate_load, latencies
from loadtest.load import Outcome, Record, Turn

ROOT = Path(__file__).resolve().parents[2]


def test_latencies_count_from_when_a_request_was_due() -> None:
    records = [
        Record(scheduled=1.0, sent=1.5, times=[2.0, 2.1, 2.5], tokens=[1, 1, 2]),
        Record(scheduled=3.0, sent=3.0, times=[3.2], tokens=[1]),
    ]
    found = latencies(Outcome(started=0.0, wall=4.0, cpu=0.0, records=records))
    assert found["first token p50 ms"] == pytest.approx(600)  # of 1.0 and 0.2
    assert found["gap p50 ms"] == pytest.approx(250)  # of 0.1 and 0.4
    assert found["normalized latency p50 ms"] == pytest.approx(287.5)  # of 1.5 / 4 and 0.2
    assert found["sent late p99 ms"] == pytest.approx(495)


def test_a_server_that_does_not_answer_is_no_result() -> None:
    with pytest.raises(RuntimeError, match=r"request 0: 0 of 4 tokens Unavailable"):
        generate_load("127.0.0.1:9", [Turn("a", 1, 4)], [0.0], streams=1)


@pytest.mark.slow
def test_the_command_measures_a_real_server(smollm2: Path, tmp_path: Path) -> None:
    output = tmp_path / "served.json"
    command = [sys.executable, "-m", "bench.served", "--quick", "--rounds", "1", "--threads", "1", "--streams", "2"]
    command += ["--rate", "8", "--memory-slots", "512", "--model", str(smollm2), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["served / engine alone"]["median"] > 0
    served, online = result["served"], result["online"]
    assert served["first token p99 ms"]["median"] >= served["first token p50 ms"]["median"] > 0
    # Six requests over five gaps: nothing is answered before the last one is due.
    assert 0 < online["requests/s"]["median"] < online["offered requests/s"]["median"] * 6 / 5
    memory = result["memory"]
    for moment in ("ready", "loaded"):
        assert set(memory[moment]) == {"tritonserver", "stub", "engine", "all"}
        for sizes in memory[moment].values():
            assert 0 < sizes["proportional GB"] <= sizes["resident GB"] <= sizes["peak GB"]
        assert memory[moment]["engine"]["resident GB"] > 0.27  # the weights
    assert memory["seconds to ready"] > 1
