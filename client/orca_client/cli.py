"""`orca-client "prompt"`: stream an answer to the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from orca_client.client import DEFAULT_MODEL, DEFAULT_URL, OrcaClient
from orca_client.errors import DeadlineExceeded, InvalidArgument, NotFound, OrcaError, Unavailable, Unsupported
from orca_client.types import ChannelOptions, Message, SamplingOptions, TextDelta

EXIT_CODES = """exit codes:
  0  the answer is complete
  1  the server failed
  2  the request is wrong, or the server does not serve it
  3  the server cannot be reached or is full
  4  the answer took longer than --timeout
  130  interrupted
"""


def _exit_code(error: OrcaError) -> int:
    if isinstance(error, InvalidArgument | Unsupported | NotFound):
        return 2
    if isinstance(error, Unavailable):
        return 3
    return 4 if isinstance(error, DeadlineExceeded) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orca-client",
        description="Stream the answer to a prompt to the terminal.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", help='the prompt, or "-" to read it from standard input')
    parser.add_argument("--url", default=DEFAULT_URL, help="gRPC endpoint of the server (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", help="end the answer before this text; may be repeated")
    parser.add_argument("--priority", type=int, help="lower runs first, where the server's policy knows priorities")
    parser.add_argument("--tenant", help="whose share of the server this counts to, where its policy knows tenants")
    parser.add_argument("--cache-salt", help="share cached prefixes only with requests of the same salt")
    parser.add_argument("--expected-tokens", type=int, help="a guess of the answer's length, for the scheduler")
    parser.add_argument("--chat", action="store_true", help="apply the chat template of the server's model")
    parser.add_argument("--system", help="system message of the chat (implies --chat)")
    parser.add_argument("--timeout", type=float, help="seconds for the whole answer")
    parser.add_argument("--ssl", action="store_true", help="connect with TLS")
    parser.add_argument("--root-certificates", metavar="FILE", help="PEM file to trust (implies --ssl)")
    parser.add_argument("--stats", action="store_true", help="print token counts and times to standard error")
    return parser


def _stream(args: argparse.Namespace, prompt: str) -> None:
    sampling: SamplingOptions = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "stop": args.stop,
        "priority": args.priority,
        "tenant": args.tenant,
        "cache_salt": args.cache_salt,
        "expected_tokens": args.expected_tokens,
    }
    channel_options: ChannelOptions = {"ssl": args.ssl}
    if args.root_certificates:
        channel_options["creds"] = grpc.ssl_channel_credentials(Path(args.root_certificates).read_bytes())
    start = time.perf_counter()
    first = None
    with OrcaClient(args.url, **channel_options) as client:
        if args.chat or args.system is not None:
            messages: list[Message] = [{"role": "user", "content": prompt}]
            if args.system is not None:
                messages.insert(0, {"role": "system", "content": args.system})
            events = client.stream_chat(messages, model=args.model, timeout=args.timeout, **sampling)
        else:
            events = client.stream(prompt, model=args.model, timeout=args.timeout, **sampling)
        with events:
            for event in events:
                first = first or time.perf_counter()
                if isinstance(event, TextDelta):
                    print(event.text, end="", flush=True)
                    continue
                print(flush=True)
                if args.stats:
                    end = time.perf_counter()
                    print(
                        f"{event.num_input_tokens} tokens in, {event.num_output_tokens} out ({event.finish_reason}), "
                        f"first after {first - start:.3f} s, all after {end - start:.3f} s, "
                        f"{event.num_output_tokens / (end - start):.1f} tokens/s",
                        file=sys.stderr,
                    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        prompt = sys.stdin.buffer.read().decode() if args.prompt == "-" else args.prompt
        _stream(args, prompt)
    except (OrcaError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has left, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would complain
            return 141
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return _exit_code(error) if isinstance(error, OrcaError) else 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
