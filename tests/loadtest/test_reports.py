"""Reports, commands, Locust and the paper's figures, all on real servers of a tiny model."""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from loadtest import figures, paper, random_model, soak
from loadtest.cli import main
from loadtest.engine_batches import SYSTEMS, feasibility, figure9, open_runner, run_batch
from loadtest.experiment import Plan, Series, at_latency
from loadtest.measurement import Target
from loadtest.workload import PAPER
from orca_backend.models.spec import ModelSpec
from orca_backend.models.weights import load_decoder

ROOT = Path(__file__).parents[2]
TINY = {"dtype": "float32", "threads": 1, "kernels": "torch"}


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as opened:
        return list(csv.DictReader(opened))


def check_page(page: Path, *expected: str) -> str:
    """A page that needs nothing else, whose figures have the page's own colour and a PNG each."""
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', text)
    assert "light-dark(" in text
    for match in re.finditer(r"<svg.*?</svg>", text, re.DOTALL):
        svg = ET.fromstring(match[0])
        assert "currentColor" in match[0]
        assert (page.parent / f"{svg.attrib['aria-label']}.png").stat().st_size > 1000
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    for what in ("machine", "commit", "command", *expected):
        assert what in text
    assert str(ROOT) not in text
    return text


def test_a_load_from_the_command_line(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--url", target.url, "--metrics-url", str(target.metrics_url), "--model", str(target.checkpoint)]
    load = ["--workload", "uniform:8-32,2-8", "--rate", "15", "--requests", "20", "--ttft", "30"]
    assert main(["run", *server, *load, "--output", str(tmp_path)]) == 0
    check_page(tmp_path / "report.html", "poisson, 15 sessions/s", "TTFT 30000 ms for 99 % of requests: kept")
    requests = rows_of(tmp_path / "load-requests.csv")
    assert len(requests) == 20
    assert all(float(row["sent_s"]) <= float(row["first_token_s"]) <= float(row["ended_s"]) for row in requests)
    assert "throughput" in capsys.readouterr().out


def test_a_load_that_gets_no_answer_says_why(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--url", target.url, "--served-name", "absent", "--model", str(target.checkpoint), "--rate", "15"]
    assert main(["run", *load, "--workload", "homogeneous:8,2", "--requests", "2", "--output", str(tmp_path)]) == 1
    assert "2 failed: " in capsys.readouterr().out
    assert all(row["error"] for row in rows_of(tmp_path / "load-requests.csv"))


def test_a_soak_from_the_command_line(target: Target, tmp_path: Path) -> None:
    server = ["--url", target.url, "--metrics-url", str(target.metrics_url), "--model", str(target.checkpoint)]
    load = ["--workload", "uniform:8-32,2-8", "--minutes", "0.04", "--passes", "2", "--share", "0.3", "--streams", "2"]
    assert main(["soak", *server, *load, "--output", str(tmp_path)]) in (0, 1)  # p99 of so few may be anything
    text = check_page(tmp_path / "report.html", "0 failed")
    assert "memory grows" not in text  # it is not ours to look at
    assert len(rows_of(tmp_path / "last-pass-requests.csv")) > 1
    assert text.count("p99 of") >= 3


def test_a_terminated_command_ends_what_it_has_started(target: Target, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "loadtest.cli",
        "run",
        "--model",
        str(target.checkpoint),
        "--output",
        str(tmp_path),
    ]
    command += [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
    process = psutil.Popen([*command, "--workload", "uniform:8-32,2-8", "--rate", "1", "--requests", "3000"], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not any("loadtest.generator" in child.cmdline() for child in process.children()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started = process.children(recursive=True)
    assert len(started) >= 4  # the generator; the server, its stub and its engine
    process.terminate()
    assert process.wait(60) == 130
    assert not psutil.wait_procs(started, timeout=60)[1]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run", "--workload", "nothing", "--rate", "1"], "no workload 'nothing'"),
        (["run", "--rate", "1", "--set", "scheduler.max_bs=0"], "--set scheduler.max_bs=0"),
        (["run"], "poisson arrivals need a rate"),
        (["run", "--arrivals", "closed", "--rate", "1"], "closed arrivals have no rate"),
        (
            ["run", "--rate", "1", "--url", "localhost:1", "--set", "dtype=float32"],
            "--set is for a server that is started",
        ),
        (["fit", "/nowhere.csv"], "/nowhere.csv"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    arguments: list[str], what: str, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *(["--model", str(smollm2)] if arguments[0] == "run" else [])]) == 1
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("count", [30, 1])  # with 1 there is nothing to do for one of the two
def test_two_locust_processes_send_every_session_once(target: Target, tmp_path: Path, count: int) -> None:
    command = [str(Path(sys.executable).with_name("locust")), "-f", str(ROOT / "loadtest" / "locustfile.py")]
    command += [
        "--headless",
        "--processes",
        "2",
        "-u",
        "2",
        "--host",
        target.url,
        "--checkpoint",
        str(target.checkpoint),
    ]
    command += [
        "--workload",
        "uniform:8-32,2-8",
        "--requests",
        str(count),
        "--rate",
        "15",
        "--csv",
        str(tmp_path / "locust"),
    ]
    command += ["--report", str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    requests = rows_of(tmp_path / "report" / "locust-requests.csv")
    assert sorted(int(row["session"]) for row in requests) == list(range(count))
    assert not any(row["error"] for row in requests)
    check_page(tmp_path / "report" / "report.html")
    kinds = {row["Type"]: int(row["Request Count"]) for row in rows_of(tmp_path / "locust_stats.csv")}
    assert {"request", "TTFT", "ITL", "normalized", "speed", "sent late"} <= set(kinds)
    assert kinds["request"] == kinds["TTFT"] == count


# ---- The paper


def test_schedules_cost_what_the_arithmetic_of_the_papers_trace_says() -> None:
    for size, fair, shortest in ((8, 1.78, 7.0), (16, 1.87, 7.8), (32, 1.93, 8.4)):
        found = paper.iterations(PAPER, size)
        assert found.orca == pytest.approx(64.5 / size, rel=0.01)
        assert found.static_fair / found.orca == pytest.approx(fair, rel=0.01)
        assert found.static_ft / found.orca == pytest.approx(shortest, rel=0.01)


def test_the_digitised_figure_has_the_papers_36_9() -> None:
    curves = paper.figure10("175B")
    orca, baseline = (at_latency(curves[name], 190.0) for name in ("orca(32)", "ft(1,1)"))
    assert orca is not None
    assert baseline is not None
    assert orca / baseline == pytest.approx(36.9, rel=0.05)
    assert set(paper.figure10("101B")) == set(paper.figure10("341B")) == set(curves)


def test_reading_a_curve_at_a_latency() -> None:
    curve = [(1.0, 10.0), (2.0, 20.0), (3.0, 80.0)]
    assert at_latency(curve, 40.0) == pytest.approx(2.5)
    assert at_latency(curve, 100.0) == 3.0
    assert at_latency(curve, 5.0) is None
    assert at_latency([], 5.0) is None


def test_figure_3_lets_the_short_request_go_and_the_late_one_in(smollm2: Path, tmp_path: Path) -> None:
    """With a model that takes its time: requests come in order, and while the first one runs."""
    page = figures.figure3(smollm2, tmp_path, Console(stderr=True), {"threads": 1})
    check_page(page, "x3")
    rows = {(row["schedule"], row["request"]): row for row in rows_of(tmp_path / "figure3.csv")}
    ended = {key: float(row["ended (s)"]) for key, row in rows.items()}
    first = {key: float(row["first token (s)"]) for key, row in rows.items()}
    assert ended["orca(2)", "x1"] < first["orca(2)", "x2"] < ended["orca(2)", "x0"]
    assert first["orca(2)", "x3"] > min(ended["orca(2)", "x0"], ended["orca(2)", "x2"])
    assert ended["static_fair(2)", "x0"] < ended["static_fair(2)", "x1"]
    assert ended["static_fair(2)", "x1"] == pytest.approx(ended["static_fair(2)", "x2"], abs=0.05)
    assert rows["static_fair(2)", "x1"]["of them wasted"] == str(figures.FIGURE3_TOKENS)
    assert first["static_fair(2)", "x3"] > ended["static_fair(2)", "x2"]


def test_figure_9_runs_every_batch_on_every_engine(tiny_llama: Path, tmp_path: Path) -> None:
    page = figure9(tiny_llama, tmp_path, Console(stderr=True), {**TINY, "kernels": "auto"}, 1, (1, 2))
    check_page(page)
    rows = rows_of(tmp_path / "figure9.csv")
    assert [(row["prompt"], row["batch"]) for row in rows] == [("32", "1"), ("32", "2"), ("128", "1"), ("128", "2")]
    assert all(float(row[f"{system} (ms)"]) > 0 for row in rows for system in SYSTEMS)
    for row in feasibility(ModelSpec.read(tiny_llama)):
        assert row["2048 per request"] < row["128 + 32 per request"] < row["32 + 32 per request"]


def test_a_random_model_of_a_small_shape_is_served_like_any_other(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "gpt"
    random_model.make(checkpoint, random_model.Shape(layers=2, hidden=64, heads=2), tiny_llama)
    runner = open_runner(checkpoint, TINY, 256)
    assert run_batch(runner, 2, prompt=20, generated=3, first_id=1) > 0
    decoder, spec = load_decoder(checkpoint, torch.float32)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.max_positions) == (2, 64, 2, 2048)
    assert decoder.layers[1].mlp.up.weight.std() == pytest.approx(0.02, rel=0.05)
    assert decoder.norm.weight.mean() == pytest.approx(1.0, abs=0.02)
    weights = sum(math.prod(shape) for shape in random_model.tensor_shapes(random_model.SHAPES["13B"], 50257).values())
    assert weights == pytest.approx(13e9, rel=0.02)


@pytest.mark.slow
def test_figure_10_compares_three_schedules(tiny_llama: Path, tmp_path: Path) -> None:
    series = [Series(policy, 2) for policy in ("orca", "static_fair", "static_ft")]
    plan = Plan("paper", 160, series, series[0], (0.5,), 1.0, 1.5, scale=0.25)
    page = figures.figure10(plan, tiny_llama, tmp_path, Console(stderr=True), TINY)
    check_page(page, "the paper: 175B", "all lengths times 0.25", "At equal latency", "orca(2) / static_ft(2)")
    saturated = {row["series"]: float(row["saturated (requests/s)"]) for row in rows_of(tmp_path / "saturated.csv")}
    assert saturated["orca(2)"] > saturated["static_ft(2)"] > 0  # a factor of several, on any machine
    assert [row["series"] for row in rows_of(tmp_path / "points.csv")] == ["orca(2)", "static_fair(2)", "static_ft(2)"]


def test_a_soak_that_fails_grows_and_drifts(target: Target) -> None:
    from loadtest.load import Outcome, Record
    from loadtest.measurement import Measurement
    from loadtest.summary import summarize

    def one(memory: int, latency: float, error: str = "") -> soak.Pass:
        records = [Record(times=[latency, 2 * latency], tokens=[1, 1], ended=2 * latency) for _ in range(3)]
        if error:
            records.append(Record(error=error))
        outcome = Outcome(started=0.0, wall=1.0, cpu=0.0, records=records)
        return soak.Pass(Measurement(outcome=outcome, summary=summarize(outcome), moments=[]), memory)

    steady = soak.verdicts([one(50, 1.0), one(100, 1.0), one(101, 1.1)], soak.Limits())
    assert all(good for *_, good in steady)
    bad = soak.verdicts([one(100, 1.0), one(100, 1.0), one(110, 1.3, "Internal: no")], soak.Limits())
    assert not any(good for *_, good in bad)
    elsewhere = soak.verdicts([one(0, 1.0), one(0, 1.0)], soak.Limits())  # a server of --url
    assert not any("memory" in asked for asked, *_ in elsewhere)
