"""What the Orca paper says, to lay beside what is measured: Figure 10's points, and what its schedules must cost."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

from loadtest.lengths import Draw

FIGURE10 = Path(__file__).with_name("data") / "paper_figure10.json"
SAMPLES = 4000  # batches that an expectation is estimated from: its error is then below 1 %


def figure10(model: str = "175B") -> dict[str, list[tuple[float, float]]]:
    """The curves of a model ("101B", "175B" or "341B"): points (requests/s, ms a token), digitised.

    An Orca curve is its own points after the part that all of them share.
    """
    read = json.loads(FIGURE10.read_text())[model]
    curves: dict[str, list[tuple[float, float]]] = {name: [(x, y) for x, y in points] for name, points in read.items()}
    shared = curves.pop("shared")
    return {
        name: [*(point for point in shared if point[0] < points[0][0]), *points] if name.startswith("orca") else points
        for name, points in curves.items()
    }


class Iterations(NamedTuple):
    """Iterations of the model for each request, at saturation, by schedule."""

    orca: float
    static_fair: float
    static_ft: float


def iterations(draw: Draw, batch: int) -> Iterations:
    """Expected iterations for a request in batches of `batch` of requests drawn independently.

    Orca: every request takes part in as many iterations as it generates tokens. Static, fair: one for all prompts, then
    until the longest answer has ended. Static as the paper ran FasterTransformer (section 6.2): the first iteration
    takes as much of every prompt as the shortest one has, the rest is fed token by token.
    """
    rng = random.Random(batch)
    generated = fair = shortest = 0
    for _ in range(SAMPLES):
        members = [draw(rng) for _ in range(batch)]
        generated += sum(output for _, output in members)
        fair += max(output for _, output in members)
        shortest += max(prompt + output for prompt, output in members) - min(prompt for prompt, _ in members)
    requests = SAMPLES * batch
    return Iterations(generated / requests / batch, fair / requests, shortest / requests)
