"""Timelines of recordings: the cells are what the rows say, and every form shows the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orca_backend.cli import main
from orca_backend.scheduler.iteration import Row
from orca_backend.timeline.cells import cells
from orca_backend.timeline.recording import Flight, IterationRecord, Recording, RequestRecord, write

# Each line is an iteration: the rows (request, start, tokens, whether it samples), and who was preempted.
ROWS: list[tuple[list[tuple[int, int, int, bool]], list[int]]] = [
    ([(1, 0, 4, True)], []),
    ([(1, 4, 1, True), (2, 0, 3, False)], []),
    ([(1, 5, 1, True), (2, 3, 3, True)], []),
    ([(2, 6, 1, True)], []),  # 1 has ended
    ([(2, 7, 1, True), (3, 32, 5, True)], []),  # the beginning of 3 was cached
    ([(3, 37, 1, True)], [2]),
    ([(2, 0, 8, True)], []),  # again, with what it had generated; 3 is left out
    ([(2, 7, 1, False), (3, 38, 1, True)], []),  # 2 has ended, and is kept in its batch
]
PROMPTS = {1: 4, 2: 6, 3: 37, 4: 9, 5: 9}
ARRIVED = {1: 0, 2: 0, 3: 2, 4: 3, 5: 7}  # the iteration before which it came
ENDED = {1: 2}  # the iteration after which it ended
EXPECTED = {
    1: "Pdd     ",
    2: ".ccdd!Px",
    3: "  ..Pd-d",
    4: "   .....",
    5: "       .",
}


def flight() -> Flight:
    requests = {
        i: RequestRecord(
            id=i,
            arrived=ARRIVED[i] - 0.5,
            prompt_tokens=prompt,
            max_new_tokens=9,
            ended=ENDED[i] + 0.8 if i in ENDED else None,
            end="stop" if i in ENDED else "",
        )
        for i, prompt in PROMPTS.items()
    }
    iterations = [
        IterationRecord(
            id=100 + i,
            policy="vllm",
            scheduled=float(i),
            returned=i + 0.9,
            schedule_seconds=0.001,
            run_seconds=0.8,
            rows=[Row(*row) for row in rows],
            prefill_tokens=sum(count for _, _, count, _ in rows if count > 1),
            decode_tokens=sum(count for _, _, count, _ in rows if count == 1),
            running=2,
            waiting=1,
            slots_reserved=16 * len(rows),
            slots_used=10,
            slots_total=64,
            preempted=preempted,
        )
        for i, (rows, preempted) in enumerate(ROWS)
    ]
    recording = Recording(model="m", policy="vllm", pid=7, reason="somebody asked", monotonic=9.0, unix=1e9)
    return Flight(recording, requests, iterations)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flight.jsonl"
    recorded = flight()
    write([recorded.recording, *recorded.requests.values(), *recorded.iterations], path)
    return path


def drawn(recorded: Flight, first: int = 0, last: int = 8) -> dict[int, str]:
    rows = cells(recorded, recorded.iterations[first:last])
    return {i: "".join(cell.value if cell else " " for cell in row) for i, row in rows.items()}


def test_cells() -> None:
    assert drawn(flight()) == EXPECTED


def test_cells_of_a_window_are_those_of_the_whole() -> None:
    """What a row is depends on rows before it, which a window does not show."""
    for first in range(8):
        for last in range(first + 1, 9):
            whole = {i: row[first:last] for i, row in EXPECTED.items()}
            assert drawn(flight(), first, last) == {i: row for i, row in whole.items() if row.strip()}


def test_text(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["timeline", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "m, policy vllm, process 7, recorded because somebody asked"
    assert lines[2] == "iterations 100 to 107, 0.000 s to 7.900 s"
    assert lines[4:8] == ["1         Pdd      stop", "2         .ccdd!Px", "3           ..Pd-d", "and 2 that only wait"]
    assert lines[8].startswith("K/V")
    assert lines[8].endswith("50%")
    assert [line[0] for line in lines[10:]] == list(".Pcd-!x")


def test_windows(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")  # ten iterations side by side
    for options, ids in (
        (["--iterations", "102:104"], "102 to 104"),
        (["--iterations", ":101"], "100 to 101"),
        (["--iterations", "106:"], "106 to 107"),
        (["--from", "2.5", "--to", "4"], "103 to 104"),
    ):
        assert main(["timeline", str(file), *options]) == 0
        assert f"iterations {ids}," in capsys.readouterr().out
    assert main(["timeline", str(file), "--iterations", "200:"]) == 1
    assert "has no such iterations, of 8" in capsys.readouterr().err
    for words in ("5", "1-2", "a:b"):
        with pytest.raises(SystemExit):
            main(["timeline", str(file), "--iterations", words])
        assert f"'{words}' is not A:B" in capsys.readouterr().err
    assert main(["timeline", str(file), "--out", "x.txt"]) == 1
    assert capsys.readouterr().err == "orca: --out x.txt: its name must end in .png, .svg, .pdf or .json\n"


def test_more_iterations_than_fit_are_panels_or_the_last_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = flight()
    iterations = [*recorded.iterations]
    for i in range(8, 25):
        iterations.append(
            IterationRecord(**{name: getattr(iterations[7], name) for name in IterationRecord.__struct_fields__} | {
                "id": 100 + i, "scheduled": float(i), "returned": i + 0.9, "rows": [Row(3, 31 + i, 1)],
            })
        )  # fmt: skip
    write([recorded.recording, *recorded.requests.values(), *iterations], tmp_path / "long.jsonl")
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["timeline", str(tmp_path / "long.jsonl")]) == 0
    assert "iterations 115 to 124," in capsys.readouterr().out
    assert main(["timeline", str(tmp_path / "long.jsonl"), "--iterations", "101:"]) == 0
    text = capsys.readouterr().out
    for panel in ("101 to 110", "111 to 120", "121 to 124"):
        assert f"iterations {panel}," in text


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_picture(file: Path, tmp_path: Path, name: str, begins: bytes) -> None:
    assert main(["timeline", str(file), "--out", str(tmp_path / name)]) == 0
    picture = (tmp_path / name).read_bytes()
    assert picture.startswith(begins)
    if name.endswith("svg"):
        text = picture.decode()
        for words in ("waits to be started", "preempted", "and 2 that only wait", "K/V slots", ">102<"):
            assert words in text


def test_trace(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert main(["timeline", str(file), "--out", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"] / 1e6) for event in slices if (event["pid"], event["tid"]) == (2, 2)] == [
        ("waits to be started", 0.0),
        ("chunk 3", 1.0),
        ("chunk 3", 2.0),
        ("decode 1", 3.0),
        ("decode 1", 4.0),
        ("preempted", 5.0),
        ("prefill 8", 6.0),
        ("inactive 1", 7.0),
    ]
    iterations = [event for event in slices if event["pid"] == 1 and event["tid"] > 0]
    assert [event["args"]["id"] for event in iterations] == list(range(100, 108))
    assert {event["tid"] for event in iterations} == {1}
    assert sum(event["ph"] == "C" for event in events) == 3 * 8
    for event in slices:
        assert event["dur"] >= 0


@pytest.mark.parametrize("content", ["", "not JSON\n", '{"type":"request","id":1}\n', "[1]\n"])
def test_what_is_no_recording(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text(content)
    assert main(["timeline", str(tmp_path / "x")]) == 1
    assert "is not a recording of an engine" in capsys.readouterr().err


def test_dump_without_an_engine() -> None:
    command = [sys.executable, "-m", "orca_backend.cli", "dump", "--pid", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "orca: there is no such engine process\n")
