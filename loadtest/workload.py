"""Workloads by name: what is asked, and when. The same specification and seed give the same requests.

    paper                                  prompts of U(32,512) tokens, answers of U(1,128): the Orca paper, section 6.2
    homogeneous:PROMPT,OUTPUT              every request the same, as in section 6.2's (32,32) and (256,256)
    uniform:LEAST-MOST,LEAST-MOST          prompts and answers
    fit:NAME                               lengths like those of a public file (loadtest/data/length_fits.json)
    lengths:FILE                           lengths drawn from a file
    trace:FILE[,FIRST]                     the requests of a file in their order, beginning with number FIRST
    shared-prefix:GROUPS,PREFIX,SUFFIX,OUTPUT   each prompt begins with one of GROUPS texts of PREFIX tokens
    chat:TURNS,PROMPT,OUTPUT,PAUSE         conversations of up to TURNS messages of PROMPT tokens; PAUSE (mean) seconds

Answers end only with their length (ignore_eos).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadtest import arrivals
from loadtest.lengths import Draw, Lengths, Trace, fitted, uniform
from loadtest.load import Session, Turn
from loadtest.texts import texts_of

# Makes session number i of a workload.
Make = Callable[[int, random.Random], Session]

PAPER = uniform((32, 512), (1, 128))
_REDRAWS = 1000  # for one request, before a distribution is taken to have none within the limit
_TEMPLATE_TOKENS = 16  # of a message's role and borders in common chat templates, at most


_FORMS = {
    "paper": "paper",
    "homogeneous": "homogeneous:PROMPT,OUTPUT",
    "uniform": "uniform:LEAST-MOST,LEAST-MOST",
    "fit": "fit:NAME",
    "lengths": "lengths:FILE",
    "trace": "trace:FILE[,FIRST]",
    "shared-prefix": "shared-prefix:GROUPS,PREFIX,SUFFIX,OUTPUT",
    "chat": "chat:TURNS,PROMPT,OUTPUT,PAUSE",
}


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """When sessions come: "closed" (one when another ends), or as arrivals.py has it "poisson", "gamma" or "trace".

    `rate` is sessions a second; for a trace, None keeps the recorded one. `variation` is for "gamma".
    """

    kind: str = "poisson"
    rate: float | None = None
    variation: float = 1.0

    def __post_init__(self) -> None:
        """Reject what could not be sent."""
        if self.kind not in ("closed", "poisson", "gamma", "trace"):
            raise ValueError(f"arrivals must be closed, poisson, gamma or trace, got {self.kind!r}")
        if self.kind in ("poisson", "gamma") and self.rate is None:
            raise ValueError(f"{self.kind} arrivals need a rate (--rate)")
        if self.kind == "closed" and self.rate is not None:
            raise ValueError("closed arrivals have no rate: a session comes when another ends (--streams)")

    def times(self, count: int, seed: int, recorded: list[float] | None) -> list[float | None]:
        """When each of `count` sessions is due; None in a closed loop. Raises ValueError for a trace without times."""
        if self.kind == "closed":
            return [None] * count
        if self.kind == "trace":
            if not recorded:
                raise ValueError("trace arrivals need a trace workload from a file that has times")
            return [*arrivals.replay(recorded[:count], self.rate)]
        assert self.rate is not None
        return [*arrivals.gamma(count, self.rate, self.variation if self.kind == "gamma" else 1.0, seed)]


class Workload:
    """Makes sessions by a specification (see above). Raises ValueError for one that cannot be read.

    `checkpoint` is the served model's directory: its tokenizer counts. Lengths are multiplied by `scale`. A request of
    more than `limit` tokens, prompt and answer, is left out, and a conversation ends before it; `left_out` counts, in
    the sessions made last, those that had to be drawn again, and all of a trace.
    """

    def __init__(self, specification: str, checkpoint: Path, *, scale: float = 1.0, limit: int | None = None) -> None:
        self.specification = specification
        self.left_out = self._left_out_of_trace = 0
        self._scale = scale
        self._limit = limit or math.inf
        self._texts = texts_of(checkpoint)
        self._trace: Trace | None = None
        self._make = self._parse(specification)

    def sessions(self, count: int, arrivals: Arrivals, seed: int = 0) -> list[Session]:
        """The first `count` sessions of this seed. Raises ValueError if the workload does not have as many."""
        rng = random.Random(seed)
        self.left_out = self._left_out_of_trace
        made = [self._make(i, rng) for i in range(count)]
        times = arrivals.times(count, seed, self._trace.times if self._trace else None)
        return [msgspec.structs.replace(session, at=at) for session, at in zip(made, times, strict=True)]

    def _parse(self, specification: str) -> Make:
        kind, _, rest = specification.partition(":")
        parts = rest.split(",") if rest else []
        try:
            if kind == "paper":
                if parts:
                    raise ValueError("it has no parts")
                return self._drawn(PAPER)
            if kind == "homogeneous":
                prompt, output = map(int, parts)
                return self._drawn(uniform((prompt, prompt), (output, output)))
            if kind == "uniform":
                prompts, outputs = (tuple(map(int, part.split("-"))) for part in parts)
                return self._drawn(uniform(prompts, outputs))  # type: ignore[arg-type]
            if kind == "fit":
                return self._drawn(fitted(*parts))
            if kind == "lengths":
                return self._drawn(Trace.read(Path(rest)).draw)
            if kind == "trace":
                return self._recorded(Path(parts[0]), int(parts[1]) if parts[1:] else 0)
            if kind == "shared-prefix":
                groups, *lengths = map(int, parts)
                prefix, suffix, output = self._scaled(*lengths)
                return self._shared_prefix(groups, prefix, suffix, output)
            if kind == "chat":
                turns, *lengths = map(int, parts[:3])
                (pause,) = map(float, parts[3:])
                prompt, output = self._scaled(*lengths)
                return self._chat(turns, prompt, output, pause)
        except (TypeError, ValueError) as error:
            raise ValueError(f"workload {specification!r} is no {_FORMS[kind]}: {error}") from error
        raise ValueError(f"no workload {specification!r}; there are {', '.join(_FORMS.values())}")

    def _scaled(self, *lengths: int) -> list[int]:
        """At least one token each."""
        return [max(1, round(length * self._scale)) for length in lengths]

    def _fit(self, lengths: Lengths) -> Lengths | None:
        """Scaled; None (and counted) where they are beyond the limit."""
        prompt, output = self._scaled(*lengths)
        if prompt + output <= self._limit:
            return prompt, output
        self.left_out += 1
        return None

    def _must_fit(self, tokens: int) -> None:
        if tokens > self._limit:
            raise ValueError(f"every request has {tokens} tokens, and --limit is {self._limit}")

    def _single(self, lengths: Lengths, rng: random.Random) -> Session:
        prompt, output = lengths
        return Session([Turn(self._texts.draw(prompt, rng), prompt, output)])

    def _drawn(self, draw: Draw) -> Make:
        def make(_: int, rng: random.Random) -> Session:
            for _ in range(_REDRAWS):
                if lengths := self._fit(draw(rng)):
                    return self._single(lengths, rng)
            raise ValueError(f"{self.specification}: no request of at most {self._limit} tokens in {_REDRAWS}")

        return make

    def _recorded(self, path: Path, first: int) -> Make:
        trace = Trace.read(path)
        kept = [(i, lengths) for i, pair in enumerate(trace.lengths) if i >= first and (lengths := self._fit(pair))]
        self._left_out_of_trace = self.left_out
        times = trace.times and [trace.times[i] for i, _ in kept]
        self._trace = Trace([lengths for _, lengths in kept], times)

        def make(i: int, rng: random.Random) -> Session:
            if i >= len(kept):
                raise ValueError(f"{self.specification}: only {len(kept)} requests of at most {self._limit} tokens")
            return self._single(kept[i][1], rng)

        return make

    def _shared_prefix(self, groups: int, prefix: int, suffix: int, output: int) -> Make:
        self._must_fit(prefix + suffix + output)
        texts = [self._texts.draw(prefix, random.Random(group)) for group in range(groups)]

        def make(_: int, rng: random.Random) -> Session:
            beginning = rng.choice(texts)
            prompt = beginning + self._texts.draw(prefix + suffix, rng, after=beginning)
            return Session([Turn(prompt, prefix + suffix, output)])

        return make

    def _chat(self, turns: int, prompt: int, output: int, pause: float) -> Make:
        if turns < 1:
            raise ValueError(f"a conversation has at least 1 turn, got {turns}")
        self._must_fit(prompt + output + 2 * _TEMPLATE_TOKENS)

        def make(_: int, rng: random.Random) -> Session:
            made: list[Turn] = []
            for number in range(rng.randint(1, turns)):
                if made and (number + 1) * (prompt + output + 2 * _TEMPLATE_TOKENS) > self._limit:
                    break
                text = self._texts.draw(prompt, rng, special_tokens=False)
                made.append(Turn(text, prompt, output, rng.expovariate(1 / pause) if pause and made else 0.0))
            return Session(made, chat=True)

        return make
