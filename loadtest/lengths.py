"""How long prompts and answers are: distributions to draw from, files of lengths, and fits to such files."""

from __future__ import annotations

import csv
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

FITS = Path(__file__).with_name("data") / "length_fits.json"
PERCENTILES = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)

# Prompt tokens and generated tokens of one request.
Lengths = tuple[int, int]
Draw = Callable[[random.Random], Lengths]

# Columns of known files: time (or none), prompt tokens, generated tokens.
_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure's LLM inference traces of 2023 and 2024
    (None, "num_prefill_tokens", "num_decode_tokens"),  # the length files of Vidur and Sarathi-Serve
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),  # the traces of the same
    ("Timestamp", "Request tokens", "Response tokens"),  # BurstGPT
)


def uniform(prompt: Lengths, output: Lengths) -> Draw:
    """Both uniform between their (least, greatest), inclusive."""
    return lambda rng: (rng.randint(*prompt), rng.randint(*output))


@dataclass(frozen=True)
class Quantiles:
    """A distribution by its values at PERCENTILES; linear in between."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Quantiles:
        """The distribution of `numbers`. Raises ValueError for none."""
        if not numbers:
            raise ValueError("no numbers to fit a distribution to")
        ordered = sorted(numbers)
        last = len(ordered) - 1
        return cls(tuple(ordered[round(percent / 100 * last)] for percent in PERCENTILES))

    def draw(self, rng: random.Random) -> int:
        """A whole number of it, at least 1."""
        percent = rng.uniform(0, 100)
        i = min(bisect_right(PERCENTILES, percent), len(PERCENTILES) - 1)
        share = (percent - PERCENTILES[i - 1]) / (PERCENTILES[i] - PERCENTILES[i - 1])
        return max(1, round(self.values[i - 1] + share * (self.values[i] - self.values[i - 1])))


def fitted(name: str) -> Draw:
    """Prompts and answers like those of a public file, each by its own quantiles (they hardly correlate there).

    Raises ValueError for a name that is not in FITS.
    """
    fits = json.loads(FITS.read_text())
    if name not in fits:
        raise ValueError(f"no fit {name!r}; there are {', '.join(fits)}")
    prompt, output = (Quantiles(tuple(fits[name][part])) for part in ("prompt", "output"))
    return lambda rng: (prompt.draw(rng), output.draw(rng))


@dataclass(frozen=True)
class Trace:
    """Requests of a file: lengths and, where the file has them, arrivals in seconds after the first."""

    lengths: list[Lengths]
    times: list[float] | None

    @classmethod
    def read(cls, path: Path) -> Trace:
        """A CSV file with one of the known headers. Requests without a token on either side are left out.

        Raises ValueError naming the file if it has another header, or no requests.
        """
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            present = set(rows.fieldnames or ())
            columns = max((c for c in _COLUMNS if present.issuperset(filter(None, c))), key=_has_time, default=None)
            if columns is None:
                known = "; ".join(", ".join(filter(None, c)) for c in _COLUMNS)
                raise ValueError(f"{path}: columns {', '.join(sorted(present))}; known are {known}")
            time, prompt, output = columns
            found = [
                (_seconds(row[time]) if time else 0.0, (int(float(row[prompt])), int(float(row[output]))))
                for row in rows
            ]
        found = [(at, lengths) for at, lengths in found if min(lengths) > 0]
        if not found:
            raise ValueError(f"{path}: no requests")
        found.sort(key=lambda entry: entry[0])
        first = found[0][0]
        return cls([lengths for _, lengths in found], [at - first for at, _ in found] if time else None)

    def draw(self, rng: random.Random) -> Lengths:
        """The lengths of a request of the file, at random."""
        return rng.choice(self.lengths)

    def fit(self) -> dict[str, list[float]]:
        """Quantiles of prompts and answers, as in FITS."""
        prompts, outputs = zip(*self.lengths, strict=True)
        return {
            "prompt": list(Quantiles.of(prompts).values),
            "output": list(Quantiles.of(outputs).values),
        }


def _has_time(columns: tuple[str | None, str, str]) -> bool:
    return columns[0] is not None


def _seconds(text: str) -> float:
    """A number of seconds, or a date and time (of which Azure writes the seconds with seven digits)."""
    try:
        return float(text)
    except ValueError:
        whole, _, fraction = text.split("+")[0].partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
