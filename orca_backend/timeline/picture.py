"""A timeline as a picture like Figures 3 and 4 of the Orca paper: requests as rows, iterations as columns.

What a request does is told by the shade and by the hatching, so that it can be read without colours; the picture brings
its own background, so that it can be read on any page. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from orca_backend.timeline.cells import Cell, cells, only_wait
from orca_backend.timeline.recording import Flight, IterationRecord

# Face, hatching. The colours are of Okabe and Ito's palette, which colour-blind readers can tell apart.
_STYLES = {
    Cell.WAITING: ("#ffffff", "..."),
    Cell.PREFILL: ("#0072b2", ""),
    Cell.CHUNK: ("#56b4e9", "///"),
    Cell.DECODE: ("#f0e442", ""),
    Cell.IDLE: ("#ffffff", ""),
    Cell.PREEMPTED: ("#d55e00", "xx"),
    Cell.INACTIVE: ("#bbbbbb", "\\\\\\"),
}
_INK = "#202020"
_COLUMN, _ROW = 0.16, 0.2  # inches
_WIDTH = (6.0, 40.0)  # inches, least and greatest
_NUMBERED = 80  # columns up to which there is room for numbers of tokens
_SEPARATE = 240  # columns up to which each cell has an edge of its own; of more one would see the edges only


def draw(flight: Flight, window: Sequence[IterationRecord], path: Path) -> None:
    """Write the picture in the format that the name of `path` ends in (png, svg, pdf). Raises OSError or ValueError."""
    grid = cells(flight, window)
    shown = {request_id: row for request_id, row in grid.items() if not only_wait(row)}
    with matplotlib.rc_context({"font.size": 8, "hatch.linewidth": 0.6, "svg.fonttype": "none", "text.color": _INK}):
        width = min(max(_COLUMN * len(window) + 2.0, _WIDTH[0]), _WIDTH[1])
        heights = [max(_ROW * len(shown), 0.6), 0.7, 0.7]
        figure = Figure(figsize=(width, sum(heights) + 1.8), layout="constrained", facecolor="white")
        rows, tokens, slots = figure.subplots(3, 1, sharex=True, height_ratios=heights)
        _draw_requests(rows, flight, window, shown, hidden=len(grid) - len(shown))
        ids = [record.id for record in window]
        prefill = [record.prefill_tokens for record in window]
        tokens.bar(ids, prefill, width=1.0, color=_STYLES[Cell.PREFILL][0])
        decode = [record.decode_tokens for record in window]
        tokens.bar(ids, decode, width=1.0, bottom=prefill, color=_STYLES[Cell.DECODE][0], edgecolor=_INK, linewidth=0.3)
        tokens.set_ylabel("tokens")
        slots.step(ids, [record.slots_reserved for record in window], where="mid", color=_INK, label="reserved")
        slots.step(ids, [record.slots_used for record in window], where="mid", color=_INK, ls=":", label="used")
        slots.axhline(window[-1].slots_total, color=_INK, lw=0.5)
        slots.set_ylim(0, None)
        slots.set_ylabel("K/V slots")
        slots.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
        slots.set_xlabel("iteration")
        slots.xaxis.set_major_locator(MaxNLocator(integer=True))
        slots.set_xlim(ids[0] - 0.5, ids[-1] + 0.5)
        used = {cell for row in shown.values() for cell in row}
        patches = [
            Patch(facecolor=face, hatch=hatch, edgecolor=_INK, linewidth=0.5, label=cell.meaning)
            for cell, (face, hatch) in _STYLES.items()
            if cell in used
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=7)
        figure.suptitle(f"{flight.recording.model}, policy {flight.recording.policy}")
        figure.savefig(path, dpi=150)


def _draw_requests(
    axes: Axes,
    flight: Flight,
    window: Sequence[IterationRecord],
    shown: dict[int, list[Cell | None]],
    *,
    hidden: int,
) -> None:
    """The rows, the first request at the top. A thick edge is where a request ended."""
    ids = [record.id for record in window]
    separate = len(window) <= _SEPARATE
    for y, (request_id, row) in enumerate(shown.items()):
        for cell, first, count in _runs(row):
            face, hatch = _STYLES[cell]
            # Cells of work are separate, states that last are one bar.
            works = separate and cell in (Cell.PREFILL, Cell.CHUNK, Cell.DECODE)
            bars = [(i - 0.5, 1) for i in ids[first : first + count]] if works else [(ids[first] - 0.5, count)]
            width = 0.4 if separate else 0.0
            axes.broken_barh(bars, (y - 0.4, 0.8), facecolor=face, hatch=hatch, edgecolor=_INK, linewidth=width)
        last = max(column for column, cell in enumerate(row) if cell is not None)
        if flight.requests[request_id].ended_by(window[-1].returned):
            axes.plot([ids[last] + 0.5] * 2, [y - 0.4, y + 0.4], color=_INK, linewidth=2)
    if len(window) <= _NUMBERED:
        _number(axes, window, shown)
    axes.set_yticks(range(len(shown)), [str(request_id) for request_id in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_ylabel("request")
    if hidden:
        axes.set_title(f"and {hidden} that only wait", fontsize=7, loc="right")


def _number(axes: Axes, window: Sequence[IterationRecord], shown: dict[int, list[Cell | None]]) -> None:
    """How many tokens of prompts ran, where that is more than one."""
    places = {request_id: y for y, request_id in enumerate(shown)}
    for column, record in enumerate(window):
        for row in record.rows:
            if row.num_tokens > 1 and row.request_id in places:
                ink = "white" if shown[row.request_id][column] is Cell.PREFILL else _INK
                place = record.id, places[row.request_id]
                axes.text(*place, str(row.num_tokens), ha="center", va="center", fontsize=5, color=ink)


def _runs(row: Sequence[Cell | None]) -> Iterator[tuple[Cell, int, int]]:
    """Runs of equal cells: the cell, the first column, and how many."""
    column = 0
    for cell, equal in groupby(row):
        count = len(list(equal))
        if cell is not None:
            yield cell, column, count
        column += count
