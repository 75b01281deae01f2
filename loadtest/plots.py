"""The plots of the reports. Lines and text are in one foreground colour, so that an HTML page can make it its own.

Every function draws into a new figure; axes have units.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from loadtest.load import Record
from loadtest.server_metrics import Moment

FOREGROUND = "#010203"  # becomes currentColor in HTML
# Okabe and Ito's colours that are seen on white and on black, also by the colour-blind.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7b61c9")
WATERFALL_REQUESTS = 60  # more cannot be told apart

Points = Sequence[tuple[float, float]]


@contextmanager
def style() -> Iterator[None]:
    """Thin lines, a quiet grid, nothing but the foreground colour outside the data."""
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings: Any = dict.fromkeys(coloured, FOREGROUND)
    settings |= {"axes.prop_cycle": cycler(color=COLOURS), "axes.spines.top": False}
    settings |= {"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.6}
    settings |= {"svg.fonttype": "none", "font.size": 9, "legend.frameon": False, "legend.fontsize": 8}
    with matplotlib.rc_context(settings):
        yield


def new_figure(columns: int = 1, width: float = 7.5, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A figure with `columns` panels side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, columns)))


def save_png(figure: Figure, path: Path) -> None:
    """On white."""
    figure.savefig(path, format="png", dpi=140, facecolor="white")


def to_svg(figure: Figure, name: str) -> str:
    """For a page: transparent, in the page's own text colour. `name` keeps the ids of several figures apart."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :].replace(FOREGROUND, "currentColor")
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", svg, count=1)  # as wide as the page
    svg = re.sub(r'(<svg [^>]*?)height="[^"]*"', rf'\1role="img" aria-label="{name}"', svg, count=1)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)


def throughput_latency(
    axes: Axes, curves: Mapping[str, Points], *, unit: str, title: str = "", log: bool = True
) -> None:
    """One line a system: points (requests/s, latency in `unit`), in the order in which the load grew."""
    for (label, points), marker in zip(curves.items(), "osD^vP*XshD^vP*X", strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, linewidth=1.2, label=label)
    axes.set_xlabel("throughput (requests/s)")
    axes.set_ylabel(unit)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.set_title(title)
    axes.legend()


def distribution(axes: Axes, samples: Mapping[str, Sequence[float]], *, name: str) -> None:
    """The share of all values (seconds) that were at most so many milliseconds; the x axis is logarithmic."""
    for label, values in samples.items():
        ordered = 1e3 * np.sort(values)
        shares = 100 * np.arange(1, len(ordered) + 1) / max(1, len(ordered))
        axes.plot(ordered, shares, linewidth=1.4, label=label)
    for percent in (50, 90, 99):
        axes.axhline(percent, color=FOREGROUND, alpha=0.25, linewidth=0.6, linestyle=":")
    if any(np.isfinite(values).any() for values in samples.values()):  # no answer at all: nothing to scale
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(f"{name} (ms)")
    axes.set_ylabel("at most (% of all)")
    axes.set_title(name)
    if len(samples) > 1:
        axes.legend()


def timeline(figure: Figure, moments: Sequence[Moment], started: float) -> None:
    """Requests that run and wait, and the K/V pool, over the time since `started` (monotonic clock)."""
    requests, slots = figure.subplots(2, 1, sharex=True)
    times = [moment.time - started for moment in moments]
    for name in ("running", "waiting"):
        requests.plot(times, [getattr(moment, name) for moment in moments], label=name, linewidth=1.2)
    requests.set_ylabel("requests")
    requests.set_title("What the server said of itself")
    requests.legend()
    for name in ("reserved", "used"):
        share = [100 * getattr(m, f"slots_{name}") / m.slots_total if m.slots_total else 0 for m in moments]
        slots.plot(times, share, label=f"K/V slots {name}", linewidth=1.2)
    slots.set_ylabel("of the K/V pool (%)")
    slots.set_xlabel("time (s)")
    slots.set_ylim(0, 105)
    slots.legend()


def waterfall(axes: Axes, records: Sequence[Record], *, labels: Sequence[str] = (), title: str = "") -> None:
    """One bar a request: until the first token, until the last one, and a mark for every response."""
    shown = records[:WATERFALL_REQUESTS]
    for row, record in enumerate(shown):
        first = record.times[0] if record.times else record.ended
        axes.barh(row, first - record.scheduled, left=record.scheduled, height=0.7, color=COLOURS[4], alpha=0.75)
        if record.error:
            axes.plot(record.ended, row, marker="x", color=COLOURS[1])
            continue
        axes.barh(row, record.times[-1] - first, left=first, height=0.7, color=COLOURS[0], alpha=0.75)
        # One line with breaks: thousands of markers would make the page heavy.
        marks = [x for time in record.times for x in (time, time, np.nan)]
        axes.plot(marks, [row - 0.25, row + 0.25, np.nan] * len(record.times), color=FOREGROUND, linewidth=0.5)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("request")
    if labels:
        axes.set_yticks(range(len(shown)), labels[: len(shown)])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_title(title or f"The first {len(shown)} of {len(records)} requests")
    bars = [Patch(color=COLOURS[4]), Patch(color=COLOURS[0])]
    if not labels:  # where a few rows leave no room, the report says it in words
        axes.legend(bars, ["until the first token", "until the last token (each mark: a response)"], loc="lower left")
