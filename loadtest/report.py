"""A report: one self-contained HTML page, every figure as PNG beside it, and the numbers as CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from matplotlib.figure import Figure

from loadtest import machine, plots
from loadtest.load import Record
from loadtest.measurement import Measurement
from loadtest.summary import Summary, e2e, normalized, tpot, ttft

TEMPLATE = Path(__file__).with_name("report.html")
Row = Mapping[str, Any]


class Part(msgspec.Struct, kw_only=True):
    """A piece of the page: a heading, paragraphs, a figure, a table (rows of the same columns); all optional."""

    heading: str = ""
    paragraphs: Sequence[str] = ()
    svg: str = ""
    rows: Sequence[Row] = ()


class Report:
    """Collects parts, then writes them all into `directory`."""

    def __init__(self, directory: Path, title: str, lead: str, facts: Mapping[str, Any] | None = None) -> None:
        """`facts` are stated under the title, with the machine, the commit, the command and the time."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._title, self._lead = title, lead
        about = machine.machine()
        features = f" ({', '.join(about['features'])})" if about["features"] else ""
        self._facts = {
            "machine": f"{about['cores']} cores of {about['processor']}{features}, {about['memory GB']} GB",
            **({"GPUs": "; ".join(about["GPUs"])} if "GPUs" in about else {}),
            "commit": machine.commit(),
            "command": machine.command(),
            "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
            **(facts or {}),
        }
        self._parts: list[Part] = []
        self._warnings: list[str] = []

    def warn(self, *messages: str) -> None:
        """State what makes the numbers doubtful, once, at the top."""
        self._warnings += [message for message in dict.fromkeys(messages) if message not in self._warnings]

    def add(self, heading: str = "", *paragraphs: str, rows: Sequence[Row] = ()) -> None:
        """Text and a table."""
        self._parts.append(Part(heading=heading, paragraphs=paragraphs, rows=rows))

    def add_figure(self, name: str, figure: Figure, heading: str = "", *paragraphs: str) -> None:
        """A figure, also as NAME.png."""
        plots.save_png(figure, self.directory / f"{name}.png")
        self._parts.append(Part(heading=heading, paragraphs=paragraphs, svg=plots.to_svg(figure, name)))

    def add_measurement(self, name: str, measurement: Measurement) -> None:
        """Everything about one load: numbers, distributions, the server's timeline, the requests one by one."""
        summary, records = measurement.summary, measurement.outcome.records
        self.warn(*summary.warnings)
        write_csv(self.directory / f"{name}-requests.csv", [request_row(record) for record in records])
        self.add(f"{name}: in numbers", rows=[rates_row(summary)])
        self.add(rows=latency_rows(summary))
        if summary.failures:
            failures = [{"reason": reason, "requests": count} for reason, count in summary.failures.items()]
            self.add(f"{name}: failures", rows=failures)
        good = [record for record in records if not record.error]
        begin = summary.begin
        counted = [record for record in good if record.scheduled >= begin]
        with plots.style():
            figure, (first, gaps) = plots.new_figure(2)
            plots.distribution(first, {name: [ttft(record) for record in counted]}, name="time to first token")
            between = [b - a for r in counted for a, b in zip(r.times, r.times[1:], strict=False)]
            plots.distribution(gaps, {name: between}, name="time between tokens")
            self.add_figure(f"{name}-latency", figure, f"{name}: distributions")
            if measurement.moments:
                figure = plots.Figure(figsize=(7.5, 4.5), layout="constrained")
                plots.timeline(figure, measurement.moments, measurement.outcome.started)
                self.add_figure(f"{name}-timeline", figure, f"{name}: timeline")
            rows = min(len(records), plots.WATERFALL_REQUESTS)
            figure, (bars,) = plots.new_figure(height=1.5 + 0.12 * rows)
            plots.waterfall(bars, records)
            self.add_figure(f"{name}-waterfall", figure, f"{name}: one bar a request")

    def write(self) -> Path:
        """The page's path."""
        template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text())
        page = self.directory / "report.html"
        text = template.render(
            title=self._title, lead=self._lead, facts=self._facts, warnings=self._warnings, parts=self._parts
        )
        page.write_text(text)
        return page


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Rows of the same columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def request_row(record: Record) -> Row:
    """One request for a CSV file; times in seconds after the start of the load."""
    return {
        "session": record.session,
        "turn": record.turn,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.num_tokens,
        "scheduled_s": f"{record.scheduled:.6f}",
        "sent_s": f"{record.sent:.6f}",
        "first_token_s": f"{record.times[0]:.6f}" if record.times else "",
        "ended_s": f"{record.ended:.6f}",
        "ttft_s": f"{ttft(record):.6f}",
        "tpot_s": f"{tpot(record):.6f}",
        "e2e_s": f"{e2e(record):.6f}",
        "normalized_s_per_token": f"{normalized(record):.6f}",
        "longest_gap_s": f"{max((b - a for a, b in zip(record.times, record.times[1:], strict=False)), default=0):.6f}",
        "error": record.error,
    }


def rates_row(summary: Summary) -> Row:
    """Rates."""
    return {
        "requests": summary.requests,
        "failed": sum(summary.failures.values()),
        "offered (requests/s)": f"{summary.offered:.3g}",
        "throughput (requests/s)": f"{summary.throughput:.3g}",
        "generated (tokens/s)": f"{summary.tokens_per_second:.4g}",
        "prompts (tokens/s)": f"{summary.prompt_tokens_per_second:.4g}",
        "goodput (requests/s)": f"{summary.goodput:.3g}",
        "within the SLO": f"{summary.attainment:.1%}",
    }


def latency_rows(summary: Summary) -> list[Row]:
    """Latencies in milliseconds."""
    names = {
        "ttft": "time to first token",
        "itl": "time between tokens",
        "tpot": "time per output token, by request",
        "e2e": "end to end",
        "normalized": "normalized latency (per token)",
        "lateness": "sent late",
    }
    return [
        {
            "ms": label,
            **{f"p{percent}": milliseconds(value) for percent, value in summary.latency(name).percentiles.items()},
            "max": milliseconds(summary.latency(name).max),
            "mean": milliseconds(summary.latency(name).mean),
            "values": summary.latency(name).count,
        }
        for name, label in names.items()
    ]


def milliseconds(seconds: float) -> str:
    """Four digits, or whole milliseconds where those are more."""
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def spread(values: Sequence[float]) -> str:
    """The median, and of several the least and the greatest."""
    median = f"{statistics.median(values):.3g}"
    return median if len(values) == 1 else f"{median} ({min(values):.3g} to {max(values):.3g})"
