"""Several measurements of the same thing as one entry of a results file and one cell of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, greatest, and all of them; four significant digits."""
    rounded = [float(f"{value:.4g}") for value in values]
    median = float(f"{statistics.median(values):.4g}")
    return {"median": median, "min": min(rounded), "max": max(rounded), "runs": rounded}


def cell(entry: dict[str, Any], unit: str = "") -> str:
    """Median (least to greatest)."""
    if unit == "%":
        return f"{entry['median']:.0%} ({entry['min']:.0%} to {entry['max']:.0%})"
    return f"{entry['median']:.4g} ({entry['min']:.4g} to {entry['max']:.4g}) {unit}".rstrip()
