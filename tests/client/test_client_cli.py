from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from mock_prompts import MODEL, endless, script


def command(server, *args: str) -> list[str]:
    return [sys.executable, "-m", "orca_client.cli", "--url", server.grpc_url, "--model", MODEL, *args]


@pytest.fixture
def cli(server):
    def run(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command(server, *args), input=stdin, capture_output=True, timeout=60)

    return run


def test_prints_the_answer(cli, report):
    done = cli(script("Hello", " 聪", "\n!"), "--max-tokens", "5", "--temperature", "0.5", "--stop", "a", "--stop", "b")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "Hello 聪\n!\n", b"")
    sent = json.loads(report("")["inputs"]["sampling_parameters"])
    assert sent == {"max_tokens": 5, "temperature": 0.5, "stop": ["a", "b"]}


def test_what_is_for_the_scheduler_is_sent(cli, report):
    cli(script("x"), "--priority", "-2", "--tenant", "a", "--cache-salt", "s", "--expected-tokens", "9")
    sent = json.loads(report("")["inputs"]["sampling_parameters"])
    assert sent == {"max_tokens": 256, "priority": -2, "tenant": "a", "cache_salt": "s", "expected_tokens": 9}


def test_chat_with_a_prompt_from_standard_input_and_stats(cli, report):
    done = cli("-", "--system", "Be brief.", "--stats", stdin=script("ok").encode())
    assert (done.returncode, done.stdout) == (0, b"ok\n")
    assert done.stderr.startswith(b"7 tokens in, 1 out (length), first after ")
    assert json.loads(report("")["inputs"]["text_input"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": script("ok")},
    ]


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        ([script(fail_at=0, message="[INVALID_ARG] top_p")], 2, b"[INVALID_ARG] top_p"),
        ([script(fail_at=0, message="boom")], 1, b"boom"),
        (["x", "--model", "nope"], 2, b"NOT_FOUND"),
        (["x", "--url", "127.0.0.1:1"], 3, b"UNAVAILABLE"),
        ([script(hang_at=0), "--timeout", "0.2"], 4, b"DEADLINE_EXCEEDED"),
        (["x", "--timeout", "-1"], 2, b"timeout"),
        (["x", "--root-certificates", "no-such-file"], 2, b"no-such-file"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(cli, args, code, word):
    done = cli(*args)
    assert done.returncode == code
    assert word in done.stderr
    assert done.stderr.startswith(b"orca-client: error: ")
    assert done.stderr.count(b"\n") == 1


def test_standard_input_must_be_utf8(cli):
    done = cli("-", stdin=b"\xff")
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


def test_ctrl_c_cancels_the_request(server, report, sees_cancel):
    with subprocess.Popen(command(server, endless()), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"x"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert sees_cancel("")


def test_a_closed_pipe_cancels_the_request(server, sees_cancel):
    with subprocess.Popen(command(server, endless()), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        err = process.stderr.read()
        process.wait(30)
    assert (process.returncode, err) == (141, b"")
