"""Draw the results of a comparison: a panel per task and headline, a bar per system, and the spread over rounds.

Run as a script in the environment of plot.txt, with the JSON file and the PNG file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

_COLUMNS = 6


def draw(result: dict, target: Path) -> None:
    """Write the figure."""
    wanted = [
        (name, task, headline)
        for name, task in result["tasks"].items()
        if task["systems"]
        for headline in task["headlines"]
    ]
    columns = min(len(wanted), _COLUMNS)
    rows = -(-len(wanted) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(2.6 * columns + 1, 3.6 * rows + 0.2), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(wanted) :]:
        panel.remove()
    for panel, (name, task, headline) in zip(panels.flat, wanted, strict=False):
        for i, (system, metrics) in enumerate(task["systems"].items()):
            value = metrics[headline]
            spread = [[value["median"] - value["min"]], [value["max"] - value["median"]]]
            color = "tab:orange" if system.startswith("ours") else "tab:gray"
            panel.bar(i, value["median"], yerr=spread, capsize=3, color=color)
            panel.text(i, value["max"], f"{value['median']:.3g}", ha="center", va="bottom", fontsize=8)
        panel.set_xticks(range(len(task["systems"])), list(task["systems"]), rotation=40, ha="right", fontsize=8)
        panel.set_title(name, fontsize=10)
        panel.set_ylabel(headline, fontsize=8)
        panel.margins(y=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    where = f"{result['threads']} threads of {result['machine']['processor']}"
    quick = " (QUICK: not a measurement)" if result["quick"] else ""
    figure.suptitle(f"{result['model']}, {result['dtype']}, {where}, {result['date']}{quick}", fontsize=10)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
