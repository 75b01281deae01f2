"""What the commands of `orca-loadtest` do; each returns an exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest import figures, perf_analyzer, random_model, soak
from loadtest.capacity import CapacityTest, Rules, Search, compare
from loadtest.engine_batches import BATCHES, figure9
from loadtest.generator import generate
from loadtest.lengths import Trace
from loadtest.load import Load
from loadtest.measurement import Target, measure, serving
from loadtest.report import Report, Row, latency_rows, rates_row, spread, write_csv
from loadtest.summary import Slo
from loadtest.workload import Arrivals, Workload
from orca_backend.server.repository import parse_overrides

RESULTS = Path("run") / "loadtest"


def run_load(arguments: argparse.Namespace) -> int:
    """One load; exit code 1 if a request failed or the SLO was missed."""
    console = _console()
    workload = _workload(arguments)
    arrivals = Arrivals(kind=arguments.arrivals, rate=arguments.rate, variation=arguments.variation)
    sessions = workload.sessions(arguments.requests, arrivals, arguments.seed)
    slo = Slo(arguments.ttft, arguments.tpot, arguments.percentile)
    with _target(arguments, arguments.set, console) as target:
        measured = measure(target, sessions, streams=arguments.streams, warmup=arguments.warmup, slo=slo)
    summary = measured.summary
    facts = _facts(arguments, workload, arrivals) | {"SLO": f"{slo}: {'kept' if summary.meets_slo else 'missed'}"}
    report = Report(_output(arguments, "run"), "A load", "Latencies count from when a request was due.", facts)
    report.add_measurement("load", measured)
    _print_rows(console, [rates_row(summary)])
    _print_rows(console, latency_rows(summary))
    for text in (*summary.warnings, *(f"{n} failed: {reason}" for reason, n in summary.failures.items())):
        console.print(text, style="red", markup=False, highlight=False)
    _print_page(console, report.write())
    return 0 if summary.meets_slo and not summary.failures else 1


def run_capacity(arguments: argparse.Namespace) -> int:
    """The capacity of one server, or of two; exit code 1 if a server keeps the SLO at no rate."""
    console = _console()
    workload = _workload(arguments)
    slo = Slo(arguments.ttft, arguments.tpot, arguments.percentile)
    rules = Rules(slo, arguments.min_seconds, arguments.min_requests, arguments.tolerance)
    lead = f"Poisson arrivals; every probe lasts {rules.min_seconds:g} s or more and has {rules.min_requests} requests "
    lead += f"or more; the search ends when the result is known to {rules.tolerance:.0%}."
    compared = bool(arguments.versus or arguments.versus_url)
    with contextlib.ExitStack() as stack:
        of_b: list[Search] = []

        def test(name: str, target: Target) -> CapacityTest:
            def say(text: str) -> None:
                console.print(f"{name}: {text}", markup=False, highlight=False)

            return CapacityTest(target, workload, rules, say, seed=arguments.seed)

        a = test("A", stack.enter_context(_target(arguments, arguments.set, console)))
        if compared:
            settings = [*arguments.versus] if arguments.versus_url else [*arguments.set, *arguments.versus]
            other = _target(arguments, settings, console, url=arguments.versus_url, name="loadtest-b")
            of_a, of_b, ratios = compare(a, test("B", stack.enter_context(other)), arguments.rounds)
        else:
            of_a = [a.search()]
    rows = [
        {"system": name, "round": i, "probe": f"{rate:.4g}", "verdict": "passed" if good else "failed", **rates_row(s)}
        for name, searches in (("A", of_a), ("B", of_b))
        for i, search in enumerate(searches, 1)
        for rate, s, good in search.probes
    ]
    results = [
        {"system": name, "capacity (requests/s)": spread([search.rate for search in searches])}
        for name, searches in (("A", of_a), ("B", of_b))
        if searches
    ]
    facts = _facts(arguments, workload, None) | {"SLO": str(slo)}
    report = Report(_output(arguments, "capacity"), "Capacity", lead, facts)
    if compared:
        results.append({"system": "B / A", "capacity (requests/s)": spread(ratios)})
        report.add("", f"A: {' '.join(arguments.set) or 'as it is'}. B: {arguments.versus_url or ' '.join(settings)}.")
    report.add("Capacity", rows=results)
    report.add("Every probe", rows=rows)
    write_csv(report.directory / "probes.csv", rows)
    for name, searches in (("A", of_a), ("B", of_b)):
        if searches and (best := searches[-1].best):
            report.add_measurement(f"{name}-at-capacity", best)
            _print_rows(console, latency_rows(best.summary))
    _print_rows(console, results)
    _print_page(console, report.write())
    return 0 if all(search.rate for search in (*of_a, *of_b)) else 1


def run_soak(arguments: argparse.Namespace) -> int:
    """Exit code 1 if something failed, grew or drifted."""
    console = _console()
    workload = _workload(arguments)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    with _target(arguments, arguments.set, console) as target:
        rules = Rules(Slo(), max_streams=arguments.streams)
        test = CapacityTest(target, workload, rules, say, seed=arguments.seed)

        def requests(rate: float) -> int:  # of a pass
            return max(2, round(rate * 60 * arguments.minutes / arguments.passes))

        # A trace does not begin as it goes on: the second time with requests from the whole of a pass.
        rate = arguments.share * test.saturated(among=requests(arguments.share * test.saturated()))
        say(f"{arguments.share:.0%} of the saturated rate: {rate:.3g} requests/s")
        arrivals = Arrivals(kind="trace" if arguments.workload.startswith("trace:") else "poisson", rate=rate)
        sessions = workload.sessions(requests(rate), arrivals, arguments.seed)
        passes = soak.run(target, sessions, arguments.passes, say)
    found = soak.verdicts(passes, soak.Limits())
    report = Report(
        _output(arguments, "soak"), "Soak", "The same load again and again.", _facts(arguments, workload, arrivals)
    )
    rows = [{"asked": asked, "found": seen, "verdict": "ok" if good else "NOT OK"} for asked, seen, good in found]
    report.add("Verdict", rows=rows)
    report.add("Every pass", rows=[soak.row(number, done) for number, done in enumerate(passes, 1)])
    report.add_measurement("last-pass", passes[-1].measurement)
    _print_rows(console, rows)
    _print_page(console, report.write())
    return 0 if all(good for *_, good in found) else 1


def run_agreement(arguments: argparse.Namespace) -> int:
    """Exit code 1 if throughput or mean latency of the two tools differ by more than the tolerance."""
    console = _console()
    workload = _workload(arguments)
    sessions = workload.sessions(arguments.requests, Arrivals(kind="closed"), arguments.seed)
    theirs, ours = [], []
    with _target(arguments, arguments.set, console) as target:
        load = Load(url=target.url, model=target.model, sessions=sessions, streams=arguments.streams)
        generate(load)  # warms up
        for number in range(arguments.rounds):
            theirs.append(perf_analyzer.rates(perf_analyzer.run(target, sessions, arguments.streams)))
            ours.append(perf_analyzer.rates(generate(load)))
            shown = f"perf_analyzer {theirs[-1][0]:.4g} requests/s, mean {1e3 * theirs[-1][1]:.4g} ms; "
            shown += f"ours {ours[-1][0]:.4g}, {1e3 * ours[-1][1]:.4g}"
            console.print(f"round {number + 1}: {shown}", highlight=False)
    rows, agreed = [], True
    for i, name in enumerate(("requests/s", "mean latency (s)")):
        a, b = ([run[i] for run in runs] for runs in (theirs, ours))
        difference = median(b) / median(a) - 1
        agreed &= abs(difference) <= arguments.tolerance
        row = {"": name, "perf_analyzer": spread(a), "ours": spread(b), "difference of medians": f"{difference:+.1%}"}
        rows.append(row)
    lead = f"A closed loop of {arguments.streams} requests, the two tools in turn, {arguments.rounds} rounds."
    report = Report(_output(arguments, "agreement"), "perf_analyzer and ours", lead, _facts(arguments, workload, None))
    report.add("Agreement", rows=rows)
    _print_rows(console, rows)
    _print_page(console, report.write())
    return 0 if agreed else 1


def run_figure(arguments: argparse.Namespace) -> int:
    """One figure of the paper."""
    console, settings, model = _console(), parse_overrides(arguments.set), arguments.model
    output = _output(arguments, arguments.figure)
    variant = "full" if arguments.full else "scaled"
    if arguments.figure == "fig9":
        page = figure9(model, output, console, settings, 5 if arguments.full else 2, BATCHES)
    else:
        if arguments.figure == "fig3":
            page = figures.figure3(model, output, console, settings)
        elif arguments.figure == "fig10":
            page = figures.figure10(figures.FIGURE10[variant], model, output, console, settings)
        else:
            page = figures.figure11(figures.FIGURE11[variant], model, output, console, settings)
    _print_page(console, page)
    return 0


def run_random_model(arguments: argparse.Namespace) -> int:
    """Make a checkpoint."""
    random_model.make(arguments.dest, random_model.SHAPES[arguments.shape], arguments.tokenizer_of)
    return 0


def run_fit(arguments: argparse.Namespace) -> int:
    """Print the quantiles."""
    trace = Trace.read(arguments.file)
    print(json.dumps({arguments.file.stem: {"requests": len(trace.lengths), **trace.fit()}}))
    return 0


# ---- What the commands share


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(arguments.workload, arguments.model, scale=arguments.scale, limit=arguments.limit)


@contextlib.contextmanager
def _target(
    arguments: argparse.Namespace,
    settings: list[str],
    console: Console,
    *,
    url: str | None = None,
    name: str = "loadtest",
) -> Iterator[Target]:
    """The server at `url`, or at --url unless there are settings of its own, or one that is started now."""
    if url is None and settings == arguments.set:
        url = arguments.url
    if url:
        if settings:
            raise ValueError(f"--set is for a server that is started here; the one at {url} has its settings")
        known = arguments.metrics_url if url == arguments.url else None
        yield Target(url=url, checkpoint=arguments.model, model=arguments.served_name, metrics_url=known)
        return
    overrides = {"model": str(arguments.model.resolve()), **parse_overrides(settings)}
    with serving(overrides, console, model=arguments.served_name, name=name) as target:
        yield target


def _output(arguments: argparse.Namespace, name: str) -> Path:
    output: Path = arguments.output or RESULTS / name
    return output


def _facts(arguments: argparse.Namespace, workload: Workload, arrivals: Arrivals | None) -> dict[str, Any]:
    scaled = f", lengths times {arguments.scale:g}" if arguments.scale != 1 else ""
    left_out = f"; {workload.left_out} longer requests were left out" if workload.left_out else ""
    facts: dict[str, Any] = {"workload": f"{arguments.workload}{scaled}, seed {arguments.seed}{left_out}"}
    if arrivals:
        rate = f", {arrivals.rate:.4g} sessions/s" if arrivals.rate else ""
        bursts = f", variation {arrivals.variation:g}" if arrivals.kind == "gamma" else ""
        facts["arrivals"] = f"{arrivals.kind}{rate}{bursts}"
    settings = " ".join(arguments.set) or "as in engine.yaml"
    return facts | {"server": arguments.url or f"started here, {arguments.model.name}, {settings}"}


def _print_rows(console: Console, rows: Sequence[Row]) -> None:
    table = Table(*(str(name) for name in rows[0]))
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def _print_page(console: Console, page: Path) -> None:
    console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
