"""What is served: `SamplingParams`, `Request`, `Sequence` and the `TokenEvent`s it ends in.

`SamplingParams` is what a client may say; `Request` is what the engine needs to know (token ids only, every default
resolved); `Sequence` is the scheduler's mutable record of a request. Everything here is plain data: no torch, no I/O.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated, Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_TEMPERATURE = 1e6  # far beyond use; keeps its inverse a normal float32

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=256)]

# What one request may cost: every stop string is searched for in every new piece of text, on one thread for all
# requests; every stop token id travels to the engine and is looked up at every token.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKENS = 16  # generated if nobody says how many


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `sampling_parameters` (vLLM's names), with vLLM's defaults.

    `max_tokens` counts generated tokens; None means the model's configured default. `top_k` of 0 or -1 and `top_p` of
    1.0 are off. `temperature` 0 and `top_p` 0 mean greedy. `seed` None means a fresh one per request.
    The last four are for the scheduler and do not change what is generated; see `Request`. Which of them count is a
    matter of its policy.
    Raises ValueError naming the field for a value out of range (msgspec turns it into its ValidationError).
    """

    n: Positive = 1
    max_tokens: Positive | None = None
    min_tokens: NonNegative = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    bad_words: list[str] = []
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: NonNegative | None = None
    prompt_logprobs: NonNegative | None = None
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    priority: Priority = 0
    tenant: Name = ""
    cache_salt: Name = ""
    expected_tokens: Positive | None = None

    def __post_init__(self) -> None:
        """Check the ranges that types cannot express."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must be at least 0 and at most {MAX_TEMPERATURE:g}, got {self.temperature}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (or 0 for greedy), got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 1 (or 0 or -1 for off), got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise ValueError(f"repetition_penalty must be in [0.001, 1000], got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop_strings)}")
        if (length := max(map(len, self.stop_strings), default=0)) > MAX_STOP_LENGTH:
            raise ValueError(f"stop: a string may have at most {MAX_STOP_LENGTH} characters, got {length}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}"
            )

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list without empty entries."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        return [s for s in strings if s]

    @property
    def unbuilt(self) -> list[str]:
        """Names of the settings that ask for something that is understood but not built; harmless values pass."""
        asked = {
            "n": self.n != 1,
            "bad_words": any(self.bad_words),
            "logprobs": self.logprobs is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "logit_bias": bool(self.logit_bias),
        }
        return [name for name, is_asked in asked.items() if is_asked]


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the sampler of the engine needs, every default resolved. `temperature` 0 is greedy; `top_k` 0 is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation as the engine sees it: token ids in, at most `max_new_tokens` token ids out.

    `stop_token_ids` end the sequence (finish_reason "stop"; the token itself is part of the output); the
    end-of-sequence ids are among them unless the client asked to ignore them. Stop strings are text and therefore not
    known here.

    For the scheduler: lower `priority` runs first (vLLM's convention); `tenant` is whose fair share it counts to;
    prefixes are shared only between requests of one `cache_salt`; `deadline` is a value of time.monotonic(), one clock
    for all processes of a Linux machine; `expected_tokens` is the client's guess of how many tokens will be generated.
    """

    request_id: int
    prompt_ids: list[int]
    max_new_tokens: int
    stop_token_ids: list[int] = []
    sampling: SamplerSettings = SamplerSettings()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    expected_tokens: int | None = None

    @property
    def max_tokens(self) -> int:
        """The paper's max_tokens: prompt plus generated tokens, hence the slots to reserve."""
        return len(self.prompt_ids) + self.max_new_tokens


class State(enum.Enum):
    """The paper's request states (section 4.2), plus the two that it does without."""

    INITIATION = "initiation"  # no iteration has run
    RUNNING = "running"  # in an iteration that has not returned
    INCREMENT = "increment"  # at least one iteration has returned
    PREEMPTED = "preempted"  # has lost its K/V slots, and waits again
    FINISHED = "finished"


class Sequence:
    """The scheduler's record of one request. Only the thread that owns the pool touches it."""

    __slots__ = (
        "arrival",
        "arrival_time",
        "block_ids",
        "block_names",
        "ending",
        "iterations",
        "max_tokens",
        "num_computed",
        "num_recorded",
        "num_slots",
        "num_tokens",
        "output_ids",
        "rank",
        "request",
        "scheduled",
        "state",
        "swapped_ids",
    )

    def __init__(self, request: Request, arrival: int, arrival_time: float = 0.0) -> None:
        """Wrap `request`; `arrival` is the insertion number, the order of FCFS, `arrival_time` is in seconds."""
        self.request = request
        self.arrival = arrival
        self.arrival_time = arrival_time
        self.rank: tuple[float, int] = (0.0, arrival)  # place in the order of service
        self.state = State.INITIATION
        self.output_ids: list[int] = []
        self.max_tokens = request.max_tokens
        self.num_tokens = len(request.prompt_ids)  # prompt and output
        self.num_computed = 0  # tokens whose K/V is written
        self.scheduled = 0  # tokens that the iteration computes which it is in
        self.block_ids: list[int] = []
        self.num_slots = 0  # of these blocks, in tokens
        self.block_names: list[bytes] = []  # of full blocks, for the prefix cache; the salt's comes first
        self.num_recorded = 0  # blocks that the prefix cache has seen
        self.swapped_ids: list[int] = []  # blocks in host memory while preempted
        self.iterations = 0  # iterations that have returned
        self.ending: TokenEvent | None = None  # set while RUNNING: how it ends when the iteration returns

    @property
    def request_id(self) -> int:
        """The id of the request."""
        return self.request.request_id

    @property
    def expected_tokens(self) -> int:
        """Tokens that will be generated, as far as anybody knows."""
        return self.request.expected_tokens or self.request.max_new_tokens

    def tokens(self, first: int, last: int) -> list[int]:
        """Token ids at positions `first` to `last` - 1, of prompt and output."""
        prompt = len(self.request.prompt_ids)
        if first >= prompt:
            return self.output_ids[first - prompt : last - prompt]
        return self.request.prompt_ids[first:last] + self.output_ids[: max(0, last - prompt)]


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """News about one request. The event whose `finish_reason` is set is the request's last, and there is exactly one.

    `code` and `message` are set only with finish_reason "error" (`code` is a Triton error code name).
    """

    request_id: int
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    code: str = ""
    message: str = ""
