"""`orca-loadtest`: one load, capacity under an SLO, a soak, agreement with perf_analyzer, the paper's figures.

A command starts the server that it needs, with the settings of --set, or loads the one at --url.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.machine import ROOT

MODEL = ROOT / "models" / "smollm2-135m-instruct"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. What is wrong with the command line is told in words."""
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # on every way out the server that was started is ended
    try:
        from loadtest import commands  # slow to import: --help must not wait for it

        return int(getattr(commands, arguments.command)(arguments))
    except (RuntimeError, OSError, ValueError) as error:  # our own errors are among them
        if arguments.traceback:
            raise
        print(f"orca-loadtest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Every command and option."""
    parser = argparse.ArgumentParser(prog="orca-loadtest", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    one = commands.add_parser("run", help="one load and a report of it")
    _add_target(one)
    add_workload(one)
    add_arrivals(one)
    one.add_argument("--streams", type=int, default=8, help="sessions at any time, closed loop (%(default)s)")
    one.add_argument("--requests", type=int, default=100, metavar="N", help="sessions to send (%(default)s)")
    one.add_argument("--warmup", type=float, default=0.0, metavar="S", help="seconds that are not counted")
    _add_slo(one)
    one.set_defaults(command="run_load")

    capacity = commands.add_parser("capacity", help="the highest rate within an SLO; of two configurations, A B A B")
    _add_target(capacity)
    add_workload(capacity)
    _add_slo(capacity)
    capacity.add_argument("--min-seconds", type=float, default=60.0, metavar="S", help="of a probe (%(default)s)")
    capacity.add_argument("--min-requests", type=int, default=100, metavar="N", help="of a probe (%(default)s)")
    capacity.add_argument("--tolerance", type=float, default=0.05, help="relative, of the result (%(default)s)")
    capacity.add_argument(
        "--versus", action="append", default=[], metavar="NAME=VALUE", help="settings of B; A is as --set says"
    )
    capacity.add_argument("--versus-url", metavar="HOST:PORT", help="B is the server there")
    capacity.add_argument("--rounds", type=int, default=2, help="of A B, when two are compared (%(default)s)")
    capacity.set_defaults(command="run_capacity")

    soak = commands.add_parser("soak", help="the same load for a long time: failures, memory, drift of p99")
    _add_target(soak)
    add_workload(soak)
    soak.add_argument("--minutes", type=float, default=30.0, help="in all (%(default)s)")
    soak.add_argument("--passes", type=int, default=5, help="equal parts that are compared (%(default)s)")
    soak.add_argument("--share", type=float, default=0.8, help="of the saturated rate that is offered (%(default)s)")
    soak.add_argument("--streams", type=int, default=64, help="of the closed loop that saturates it (%(default)s)")
    soak.set_defaults(command="run_soak")

    agreement = commands.add_parser("agreement", help="one closed loop by perf_analyzer and by us, A B A B")
    _add_target(agreement)
    add_workload(agreement)
    agreement.add_argument("--streams", type=int, default=8, help="requests at any time (%(default)s)")
    agreement.add_argument("--requests", type=int, default=200, metavar="N", help="in a run (%(default)s)")
    agreement.add_argument("--rounds", type=int, default=3, help="of both (%(default)s)")
    agreement.add_argument("--tolerance", type=float, default=0.05, help="by which medians may differ (%(default)s)")
    # perf_analyzer divides the requests among its streams beforehand: of unequal ones some streams end early.
    agreement.set_defaults(command="run_agreement", workload="homogeneous:256,64")

    figure = commands.add_parser("paper", help="a figure of the Orca paper: fig3, fig9, fig10 or fig11")
    figure.add_argument("figure", choices=("fig3", "fig9", "fig10", "fig11"))
    figure.add_argument("--full", action="store_true", help="the paper's lengths, more rates, three seeds: hours")
    _add_server(figure)
    figure.set_defaults(command="run_figure")

    random = commands.add_parser("random-model", help="a checkpoint of one of the paper's shapes, with random weights")
    random.add_argument("shape", choices=("13B", "101B", "175B", "341B"))
    random.add_argument("dest", type=Path, help="the directory to make")
    random.add_argument("--tokenizer-of", type=Path, default=MODEL, metavar="DIR", help="whose tokenizer it gets")
    random.set_defaults(command="run_random_model")

    fit = commands.add_parser("fit", help="quantiles of a file of lengths, as in loadtest/data/length_fits.json")
    fit.add_argument("file", type=Path)
    fit.set_defaults(command="run_fit")
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of engine.yaml")
    parser.add_argument("--model", type=Path, default=MODEL, metavar="DIR", help="the served checkpoint")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the report (run/loadtest/COMMAND)")


def _add_target(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("--url", metavar="HOST:PORT", help="load the server there (gRPC) instead of starting one")
    parser.add_argument("--metrics-url", metavar="URL", help="its metrics, for the timeline")
    parser.add_argument("--served-name", default="orca", metavar="NAME", help="its model (%(default)s)")


def add_workload(parser: argparse._ActionsContainer) -> None:
    """What is asked."""
    parser.add_argument("--workload", default="paper", help="see loadtest/workload.py (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all lengths (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="TOKENS", help="leave longer requests out")
    parser.add_argument("--seed", type=int, default=0)


def add_arrivals(parser: argparse._ActionsContainer) -> None:
    """When."""
    parser.add_argument("--arrivals", default="poisson", choices=("closed", "poisson", "gamma", "trace"))
    parser.add_argument("--rate", type=float, metavar="R", help="sessions/s, open loop (a trace has its own)")
    parser.add_argument("--variation", type=float, default=1.0, help="of gamma: deviation / mean of the gaps")


def _add_slo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ttft", type=float, default=math.inf, metavar="S", help="SLO: time to first token")
    parser.add_argument("--tpot", type=float, default=math.inf, metavar="S", help="SLO: time per output token")
    parser.add_argument("--percentile", type=float, default=99.0, help="of requests within it (%(default)s)")


if __name__ == "__main__":
    sys.exit(main())
