"""What goes in and what comes out: sampling and channel options, chat messages, stream events, completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, and how many tokens it stands for.

    `text` may be empty: a token that ends the sequence, or one that completes no character, has none of its own.
    """

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream. `finish_reason` is "stop" or "length"; the counts are of the whole request.

    `num_output_tokens` is the sum of the deltas' `num_tokens`.
    """

    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


Event = TextDelta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, without the prompt. Counts are in tokens."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    request_id: str


class Message(TypedDict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class SamplingOptions(TypedDict, total=False):
    """How to generate. A key left out, or None, takes the server's default; the server checks names and values.

    `max_tokens` and `min_tokens` count generated tokens. `temperature` 0 is greedy. `stop` is text, found across token
    borders and left out of the answer unless `include_stop_str_in_output`.

    The last four are for the server's scheduler, and count where its policy uses them: lower `priority` runs first,
    `tenant` is whose fair share the request counts to, cached prefixes are shared only within one `cache_salt`, and
    `expected_tokens` is a guess of how many tokens will be generated.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool | None
    bad_words: list[str] | None
    logit_bias: dict[str, float] | None
    seed: int | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    priority: int | None
    tenant: str | None
    cache_salt: str | None
    expected_tokens: int | None


class ChannelOptions(TypedDict, total=False):
    """Passed on to tritonclient's InferenceServerClient as they are: TLS (file names), credentials, keep-alive."""

    ssl: bool
    root_certificates: str | None
    private_key: str | None
    certificate_chain: str | None
    creds: Any  # grpc.ChannelCredentials
    keepalive_options: Any  # tritonclient.grpc.KeepAliveOptions
    channel_args: list[tuple[str, Any]] | None
