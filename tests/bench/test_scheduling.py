"""The benchmark of the scheduler: with fewer requests than it is run with, and so a test of every policy's progress."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import scheduling
from orca_backend.config import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_thousands_of_requests_drain_to_zero(policy: str) -> None:
    drained = scheduling.drain(policy, 3000)
    assert drained.left == 0
    assert (drained.preemptions > 0) == (policy in ("vllm", "sarathi"))


def test_it_prints_and_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scheduling.json"
    monkeypatch.setattr(scheduling, "LIMIT_US", 1e9)
    sizes = ["--requests", "100", "--running", "8", "--waiting", "10", "--iterations", "20", "--policies", "orca"]
    monkeypatch.setattr(sys, "argv", ["scheduling", *sizes, "--output", str(output)])
    assert scheduling.main() == 0
    measured = json.loads(output.read_text())["policies"]["orca"]
    assert measured["drained"]["left"] == 0
    assert 0 < measured["waiting"]["10"]["schedule_median_us"] <= measured["waiting"]["10"]["schedule_p99_us"]
    assert "100 requests" in capsys.readouterr().out
