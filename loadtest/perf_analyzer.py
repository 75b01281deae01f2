"""NVIDIA's perf_analyzer, unmodified, on the same requests as our generator.

The program is in tritonclient's wheel. It needs two libraries: libcudart of the nvidia-cuda-runtime-cu12 wheel (no GPU
is used), and libb64, which is in the nvidia-pytriton wheel under another name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import mean

from loadtest.load import Outcome, Record, Session
from loadtest.measurement import Target

PROGRAM = "perf_analyzer"
ATTEMPTS = 3  # release 2.51 now and then ends well with an empty export
_LIBRARIES = {  # name that the program looks for: distribution, and how its file there begins
    "libb64.so.0d": ("nvidia-pytriton", "libb64"),
    "libcudart.so.12": ("nvidia-cuda-runtime-cu12", "libcudart.so.12"),
}


class PerfAnalyzerError(RuntimeError):
    """perf_analyzer is not there, or failed; the message says what to do, or what it said."""


def command(target: Target, inputs: Path, export: Path, *, streams: int, count: int) -> list[str]:
    """`count` requests in a closed loop of `streams`, each on its own gRPC stream."""
    arguments = [PROGRAM, "-m", target.model, "-u", target.url, "-i", "grpc", "--streaming", "--async"]
    arguments += ["--input-data", str(inputs), "--concurrency-range", str(streams)]
    return [*arguments, "--request-count", str(count), "--profile-export-file", str(export)]


def run(target: Target, sessions: list[Session], streams: int) -> Outcome:
    """Send the sessions (of one turn, and no chat) with perf_analyzer. Raises PerfAnalyzerError."""
    with tempfile.TemporaryDirectory() as directory, _libraries() as libraries:
        inputs, export = Path(directory) / "inputs.json", Path(directory) / "export.json"
        inputs.write_text(json.dumps({"data": [_inputs(session) for session in sessions]}))
        arguments = command(target, inputs, export, streams=streams, count=len(sessions))
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        arguments[0] = _program()
        for _ in range(ATTEMPTS):
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 0 and export.exists() and (text := export.read_text()):
                return read_export(json.loads(text), sessions)
        raise PerfAnalyzerError(f"{PROGRAM} failed with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")


def read_export(export: dict, sessions: list[Session]) -> Outcome:
    """The requests of a profile export file. Its times are in nanoseconds; it does not say how many tokens came."""
    (experiment,) = export["experiments"]
    requests = sorted(experiment["requests"], key=lambda request: request["timestamp"])
    started = requests[0]["timestamp"]
    records = []
    for i, request in enumerate(requests):
        turn = sessions[i % len(sessions)].turns[0]
        times = [(time - started) * 1e-9 for time in request["response_timestamps"]]
        sent = (request["timestamp"] - started) * 1e-9
        record = Record(session=i, prompt_tokens=turn.prompt_tokens, max_tokens=turn.max_tokens, scheduled=sent)
        record.sent, record.times, record.tokens = sent, times, [1] * len(times)
        record.ended = times[-1] if times else sent
        record.error = "" if times else "no response"
        records.append(record)
    wall = max(record.ended for record in records)
    return Outcome(started=started * 1e-9, wall=wall, cpu=0.0, records=records)


def rates(outcome: Outcome) -> tuple[float, float]:
    """Requests/s from the first request to the last answer, and mean seconds from a request to its last response."""
    records = [record for record in outcome.records if not record.error]
    span = max(record.ended for record in records) - min(record.sent for record in records)
    return len(records) / span, mean(record.times[-1] - record.sent for record in records)


def _inputs(session: Session) -> dict[str, list]:
    (turn,) = session.turns
    sampling = {"max_tokens": turn.max_tokens, "temperature": 0.0, "ignore_eos": True}
    return {"text_input": [turn.prompt], "stream": [True], "sampling_parameters": [json.dumps(sampling)]}


def _program() -> str:
    """Its path: beside this interpreter, or on PATH."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which(PROGRAM, path=os.pathsep.join([scripts, os.environ.get("PATH", "")]))
    if not found:
        raise PerfAnalyzerError(f"no {PROGRAM}: pip install tritonclient==2.51.0")
    return found


@contextlib.contextmanager
def _libraries() -> Iterator[Path]:
    """A directory in which the program finds its libraries."""
    with tempfile.TemporaryDirectory() as directory:
        for name, (package, prefix) in _LIBRARIES.items():
            Path(directory, name).symlink_to(_find(package, prefix))
        yield Path(directory)


def _find(package: str, prefix: str) -> Path:
    try:
        files = distribution(package).files or []
    except PackageNotFoundError as error:
        raise PerfAnalyzerError(f"{PROGRAM} needs a library of {package}: pip install {package}") from error
    for file in files:
        if file.name.startswith(prefix):
            return Path(str(file.locate())).resolve()
    raise PerfAnalyzerError(f"{package} has no {prefix}*: {PROGRAM} cannot run")
