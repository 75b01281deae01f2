from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.demo import CHATS, beginning, end

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "width", "first", "last"),
    [
        ("one two three", 13, "one two three", "one two three"),
        ("one two three", 12, "one two \u2026", "\u2026 two three"),
        ("one two three", 9, "one two \u2026", "\u2026 three"),
        ("one two three", 8, "one \u2026", "\u2026 three"),
        ("one\n\ntwo", 20, "one two", "one two"),
        ("unbreakable", 5, "\u2026", "\u2026"),
        ("", 5, "", ""),
    ],
)
def test_excerpts_have_whole_words(text: str, width: int, first: str, last: str) -> None:
    assert beginning(text, width) == first
    assert end(text, width) == last


@given(st.text("ab ", max_size=40), st.integers(1, 30))
def test_excerpts_fit(text: str, width: int) -> None:
    words = text.split()
    for shown, part in ((beginning(text, width), slice(None, None)), (end(text, width), slice(None, None, -1))):
        assert len(shown) <= width
        kept = [word for word in shown.split() if word != "\u2026"][part]
        assert words[part][: len(kept)] == kept


def test_demo_without_a_terminal(tmp_path: Path, smollm2: Path) -> None:
    command = [sys.executable, ROOT / "loadtest" / "demo.py", "--set", f"model={smollm2}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    starting, *lines = result.stdout.splitlines()
    assert starting == "Starting tritonserver with orca ..."
    assert "Stopping the server ..." in lines
    assert re.match(r"  curl -N \S+ -d '{.*}'$", lines[-1])
    assert "make serve" in lines[-2]
    ends = re.findall(r"leaves after \d+ tokens \((\w+)\)", result.stdout)
    assert len(ends) == len(CHATS)
    assert ends.count("stop") > len(CHATS) / 2
    assert "The capital of France is Paris." in result.stdout
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["demo.log"]
