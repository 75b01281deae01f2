"""The same workloads and arrivals in Locust: a web UI, CSV files, several processes and machines.

    locust -f loadtest/locustfile.py --host localhost:8001 --arrivals poisson --rate 2 --requests 200 [--headless]
    locust ... --arrivals closed --users 8                     # a closed loop of 8 users
    locust ... --processes 2                                   # or --master, and --worker elsewhere

In an open loop the users do nothing: every process sends its part of the schedule when it is due, whatever the server
does. The test ends when every session has ended. Each request is reported as several Locust events, by type: `request`
(end to end), `TTFT`, `ITL` (each) and `sent late` in milliseconds; `normalized` in milliseconds a token; `speed` in
tokens/s. A response's size is its tokens. Failures are reported by their reason. At the end the exact numbers of all
processes together are logged (Locust rounds), and with --report a report is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gevent
import gevent.pool
import grpc.experimental.gevent
import msgspec
import psutil
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WORKER_REPORT_INTERVAL, MasterRunner, WorkerRunner

from loadtest.cli import MODEL, add_arrivals, add_workload
from loadtest.load import Outcome, Record, Session, Turn
from loadtest.summary import e2e, normalized, summarize, tpot, ttft
from loadtest.workload import Arrivals, Workload
from orca_client import Message, OrcaClient, OrcaError, SamplingOptions, TextDelta
from orca_client.client import DEFAULT_URL

logger = logging.getLogger(__name__)
TIMEOUT_S = 600.0


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("orca", "What is sent, and when")
    add_workload(group)
    add_arrivals(group)
    group.add_argument("--requests", type=int, default=100, help="sessions to send, by all processes together")
    group.add_argument("--checkpoint", default=str(MODEL), help="directory of the served checkpoint")
    group.add_argument("--served-name", default="orca", help="name of the served model")
    group.add_argument("--report", default="", metavar="DIR", help="write a report there")


class Sender:
    """Sends this process's part of the sessions: number `index` of `count` parts."""

    def __init__(self, environment: Environment, sessions: list[Session], index: int, count: int) -> None:
        """The clock starts here."""
        options: Any = environment.parsed_options
        self._environment = environment
        self._model = options.served_name
        self.is_open = options.arrivals != "closed"
        self._numbered = list(enumerate(sessions))[index::count]
        self._closed: Iterator[tuple[int, Session]] = iter(self._numbered)
        self._unfinished = len(self._numbered)
        # Locust has patched the standard library; gRPC is to follow, but only in a process that forks no more.
        grpc.experimental.gevent.init_gevent()
        self._client = OrcaClient(environment.host or DEFAULT_URL, retries=0)
        self._client.server_ready()  # the connection is made before the clock starts
        self._group = gevent.pool.Group()
        self._cpu = psutil.Process().cpu_times()
        self._started = time.monotonic()
        self.records: list[Record] = []
        if self.is_open:
            self._group.spawn(self._dispatch)
        if not self._numbered:
            gevent.spawn(_part_is_done, environment)

    def next(self) -> None:
        """Send the next session of a closed loop. Raises StopUser if there is none."""
        try:
            number, session = next(self._closed)
        except StopIteration:
            raise StopUser from None
        self._converse(number, session, self._now())

    def stop(self) -> None:
        """End what is in flight."""
        self._group.kill()
        self._client.close()

    def outcome(self) -> Outcome:
        """All that has ended so far."""
        now = psutil.Process().cpu_times()
        cpu = now.user + now.system - self._cpu.user - self._cpu.system
        return Outcome(started=self._started, wall=self._now(), cpu=cpu, records=self.records)

    def _dispatch(self) -> None:
        for number, session in self._numbered:
            assert session.at is not None
            gevent.sleep(max(0.0, session.at - self._now()))
            self._group.spawn(self._converse, number, session, session.at)

    def _converse(self, number: int, session: Session, scheduled: float) -> None:
        messages: list[Message] = []
        for i, turn in enumerate(session.turns):
            if i:
                scheduled = self._now() + turn.pause
                gevent.sleep(turn.pause)
            record = Record(session=number, turn=i, prompt_tokens=turn.prompt_tokens, max_tokens=turn.max_tokens)
            record.scheduled = scheduled
            if session.chat:
                messages.append({"role": "user", "content": turn.prompt})
            answer, error = self._stream(turn, messages, record)
            self.records.append(record)
            self._report(record, error)
            if error:
                break
            messages.append({"role": "assistant", "content": answer})
        self._unfinished -= 1
        if not self._unfinished:
            gevent.spawn(_part_is_done, self._environment)

    def _stream(self, turn: Turn, messages: list[Message], record: Record) -> tuple[str, OrcaError | None]:
        text, failure = [], None
        sampling: SamplingOptions = {"max_tokens": turn.max_tokens, "temperature": 0.0, "ignore_eos": True}
        record.sent = self._now()
        try:
            if messages:
                answer = self._client.stream_chat(messages, model=self._model, timeout=TIMEOUT_S, **sampling)
            else:
                answer = self._client.stream(turn.prompt, model=self._model, timeout=TIMEOUT_S, **sampling)
            for event in answer:
                if isinstance(event, TextDelta):
                    record.times.append(self._now())
                    record.tokens.append(event.num_tokens)
                    text.append(event.text)
                else:
                    record.finish_reason = event.finish_reason
                    record.prompt_tokens = event.num_input_tokens
            if record.num_tokens != turn.max_tokens:
                failure = OrcaError(f"{record.num_tokens} tokens instead of {turn.max_tokens}")
                record.error = failure.message
        except OrcaError as error:
            failure = error
            record.error = f"{type(error).__name__}: {error.message}"
        record.ended = self._now()
        return "".join(text), failure

    def _report(self, record: Record, error: OrcaError | None) -> None:
        def fire(kind: str, value: float, exception: OrcaError | None = None) -> None:
            self._environment.events.request.fire(
                request_type=kind,
                name=self._model,
                response_time=value,
                response_length=record.num_tokens,
                exception=exception,
                context={},
            )

        fire("request", 1e3 * (record.ended - record.scheduled if error else e2e(record)), error)
        fire("sent late", 1e3 * (record.sent - record.scheduled))
        if error:
            return
        fire("TTFT", 1e3 * ttft(record))
        for before, after in pairwise(record.times):
            fire("ITL", 1e3 * (after - before))
        fire("normalized", 1e3 * normalized(record))
        if record.num_tokens > 1 and tpot(record) > 0:
            fire("speed", 1 / tpot(record))

    def _now(self) -> float:
        return time.monotonic() - self._started


class OrcaUser(User):
    """In a closed loop: one session after the other. In an open loop: nobody."""

    wait_time = constant(0)

    @task
    def converse(self) -> None:
        """Send one session."""
        sender = _state.sender
        if sender is None or sender.is_open:
            gevent.sleep(1)
        else:
            sender.next()


class _State:
    """Of this process: its part of the work, and in the main process what came of all parts."""

    def __init__(self) -> None:
        self.part = {"index": 0, "count": 1}
        self.sender: Sender | None = None
        self.sent = 0  # records that have gone to the main process
        self.parts = 1
        self.parts_done = 0
        self.outcome = Outcome(started=0.0, wall=0.0, cpu=0.0, records=[])


_state = _State()


@events.init.add_listener
def _connect(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.register_message("orca part", lambda msg, **_: _state.part.update(msg.data))
    if isinstance(environment.runner, MasterRunner):
        environment.runner.register_message("orca part done", lambda msg, **_: _part_is_done(environment, msg.data))


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    runner: Any = environment.runner
    options: Any = environment.parsed_options
    _state.sent = _state.parts_done = 0
    _state.outcome = Outcome(started=0.0, wall=0.0, cpu=0.0, records=[])
    workers = sorted(runner.clients) if isinstance(runner, MasterRunner) else []
    try:
        if options.arrivals == "closed" and options.num_users < len(workers):
            raise ValueError(
                f"closed arrivals: {options.num_users} users (--users) are too few for {len(workers)} workers"
            )
        arrivals = Arrivals(kind=options.arrivals, rate=options.rate, variation=options.variation)
        workload = Workload(options.workload, Path(options.checkpoint), scale=options.scale, limit=options.limit)
        sessions = workload.sessions(options.requests, arrivals, options.seed)
    except (OSError, ValueError) as error:
        logger.error(error)
        environment.process_exit_code = 1
        runner.quit()
        return
    if isinstance(runner, MasterRunner):
        _state.parts = len(workers)
        for index, worker in enumerate(workers):
            runner.send_message("orca part", {"index": index, "count": len(workers)}, worker)
    else:
        _state.sender = Sender(environment, sessions, **_state.part)


def _part_is_done(environment: Environment, news: dict[str, Any] | None = None) -> None:
    """Ends the test when every process has sent its part and has its answers."""
    runner: Any = environment.runner
    if isinstance(runner, WorkerRunner):
        gevent.sleep(WORKER_REPORT_INTERVAL)  # then Locust has sent its own numbers
        runner.send_message("orca part done", _news())
        return
    if news:
        _take_in(news)
    _state.parts_done += 1
    if _state.parts_done == _state.parts:
        (runner.quit if runner.environment.parsed_options.headless else runner.stop)()


def _news() -> dict[str, Any]:
    """What this process has recorded since the last time."""
    assert _state.sender
    outcome = _state.sender.outcome()
    outcome.records = outcome.records[_state.sent :]
    _state.sent += len(outcome.records)
    news: dict[str, Any] = msgspec.to_builtins(outcome)
    return news


def _take_in(news: dict[str, Any]) -> None:
    part, whole = msgspec.convert(news, Outcome), _state.outcome
    whole.records += part.records
    if part.cpu > whole.cpu:  # of several generators the busiest one is the bottleneck
        whole.wall, whole.cpu = part.wall, part.cpu


@events.report_to_master.add_listener
def _report_to_master(data: dict[str, Any], **_: Any) -> None:
    if _state.sender:
        data["orca"] = _news()


@events.worker_report.add_listener
def _worker_report(data: dict[str, Any], **_: Any) -> None:
    if "orca" in data:
        _take_in(data["orca"])


@events.test_stop.add_listener
def _stop(environment: Environment, **_: Any) -> None:
    if _state.sender:
        _state.outcome = _state.sender.outcome()
        _state.sender.stop()


@events.quitting.add_listener
def _conclude(environment: Environment, **_: Any) -> None:
    from loadtest.measurement import Measurement
    from loadtest.report import Report, latency_rows, rates_row

    if isinstance(environment.runner, WorkerRunner) or not _state.outcome.records:
        return
    outcome = _state.outcome
    outcome.records.sort(key=lambda record: record.sent)
    summary = summarize(outcome)
    for row in (rates_row(summary), *latency_rows(summary)):
        logger.info(", ".join(f"{name} {value}" for name, value in row.items()))
    for warning in summary.warnings:
        logger.warning(warning)
    options: Any = environment.parsed_options
    if directory := options.report:
        report = Report(Path(directory), "A load by Locust", "Latencies count from when a request was due.")
        report.add_measurement("locust", Measurement(outcome=outcome, summary=summary, moments=[]))
        logger.info(f"Report: {report.write()}")
