"""From the tensors and parameters of one Triton request to a validated `Generation` (or a `StopRequest`).

`read_request` is the only function here that touches Triton's objects: it copies everything out, since input tensors
are overwritten after `execute`. `parse` is pure. Whatever cannot be served raises `BadRequest`, whose message names the
field. Where a setting is given twice: named tensor, then `sampling_parameters`, then request parameter, then the
model's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from orca_backend.request import MAX_TOKENS, SamplingParams

T = TypeVar("T")

STREAM_WITH_INPUT = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."  # vllm_backend's text
)

# TensorRT-LLM's names of sampling parameters; the other named tensors have the names of their parameters.
_ALIASES = {"min_length": "min_tokens", "random_seed": "seed", "stop_words": "stop"}
_SAMPLING = frozenset(SamplingParams.__struct_fields__)
_SWITCHES = frozenset(
    {
        "apply_chat_template",
        "exclude_input_in_output",
        "return_cumulative_logprob",
        "return_finish_reason",
        "return_log_probs",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "stop",
        "stream",
    }
)
_OTHERS = frozenset({"beam_width", "embedding_request", "end_id", "image", "length_penalty", "pad_id"})
_TEXTS = frozenset({"text_input", "sampling_parameters"})
_RESERVED = frozenset({"headers", "sequence_end", "sequence_id", "sequence_start", "timeout"})
_UNSIGNED_64 = 1 << 64
_LONGEST_MESSAGE = 500  # characters; messages repeat what they refuse, which may be megabytes


class BadRequest(Exception):
    """A request that is refused; `code` is the name of a Triton error code, `message` names the field."""

    def __init__(self, code: str, message: str) -> None:
        """Keep the code beside the message, which is cut to 500 characters."""
        message = message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 3] + "..."
        super().__init__(message)
        self.code = code
        self.message = message


class TritonTensor(Protocol):
    """What `read_request` uses of a `pb_utils.Tensor`."""

    def name(self) -> str:
        """The tensor's name."""

    def as_numpy(self) -> Any:
        """The tensor as a numpy array; strings are an object array of bytes."""


class TritonRequest(Protocol):
    """What `read_request` uses of a `pb_utils.InferenceRequest`."""

    def inputs(self) -> list[Any]:
        """The input tensors (`TritonTensor`)."""

    def parameters(self) -> str:
        """The request parameters as a JSON object."""

    def request_id(self) -> str:
        """The client's id, perhaps empty."""

    def timeout(self) -> int:
        """The client's time limit in microseconds; 0: none."""


class RawRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came, in Python's own types; strings are still bytes. `timeout_us` of 0 means none."""

    inputs: dict[str, list[Any]]
    parameters: dict[str, Any] = {}
    request_id: str = ""
    timeout_us: int = 0


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One validated request. Either `text` is the prompt, or `messages` are to be rendered into one."""

    text: str
    messages: list[dict[str, Any]] | None = None
    sampling: SamplingParams
    max_tokens: int
    stream: bool = False
    exclude_input: bool = False
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    request_id: str = ""
    timeout_us: int = 0


class StopRequest(msgspec.Struct, frozen=True):
    """Cancel the running requests whose Triton request id is `request_id`."""

    request_id: str


def read_request(request: TritonRequest) -> RawRequest:
    """Copy everything out of a Triton request. Raises BadRequest if its parameters cannot be read."""
    inputs = {tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs()}
    text = request.parameters()
    parameters = _json("request parameters", text, dict[str, Any]) if text else {}
    return RawRequest(
        inputs=inputs, parameters=parameters, request_id=request.request_id(), timeout_us=request.timeout()
    )


def parse(raw: RawRequest, defaults: SamplingParams) -> Generation | StopRequest:
    """Validate `raw`. Raises BadRequest("INVALID_ARG" | "UNSUPPORTED", message)."""
    settings, others = _layers(raw, defaults)

    def switch(name: str) -> bool:
        return name in others and _convert(name, others[name], bool)

    if switch("stop"):
        if not raw.request_id:
            raise BadRequest("INVALID_ARG", "stop: the request id says what to stop, and it is empty")
        return StopRequest(raw.request_id)
    _refuse_unbuilt(others, switch)
    sampling = _sampling(settings)
    _refuse_unbuilt_sampling(sampling)
    if "end_id" in others and (end_id := _convert("end_id", others["end_id"], int)) >= 0:
        sampling = _sampling({**settings, "stop_token_ids": [*sampling.stop_token_ids, end_id]})
    text = _text("text_input", raw.inputs.get("text_input", []))
    if not text:
        raise BadRequest("INVALID_ARG", "text_input: the prompt is empty")
    stream = switch("stream")
    exclude_input = switch("exclude_input_in_output")
    if stream and "exclude_input_in_output" in others and not exclude_input:
        raise BadRequest("INVALID_ARG", STREAM_WITH_INPUT)
    assert sampling.max_tokens is not None
    return Generation(
        text=text,
        messages=_messages(text) if switch("apply_chat_template") else None,
        sampling=sampling,
        max_tokens=sampling.max_tokens,
        stream=stream,
        exclude_input=exclude_input or stream,
        return_finish_reason=switch("return_finish_reason"),
        return_num_input_tokens=switch("return_num_input_tokens"),
        return_num_output_tokens=switch("return_num_output_tokens"),
        request_id=raw.request_id,
        timeout_us=_timeout(raw),
    )


def _timeout(raw: RawRequest) -> int:
    """The time limit in microseconds: Triton's own field, or else the parameter (HTTP's generate leaves it there)."""
    given = raw.parameters.get("timeout")
    timeout = raw.timeout_us or (_convert("timeout", given, int) if given is not None else 0)
    if not 0 <= timeout < _UNSIGNED_64 // 2:  # in Triton's own field a negative one has become huge
        raise BadRequest("INVALID_ARG", f"timeout must be a number of microseconds from 0 to 2**63 - 1, got {timeout}")
    return timeout


def _layers(raw: RawRequest, defaults: SamplingParams) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge the sources: the sampling settings, and everything else that a tensor or parameter can say."""
    settings: dict[str, Any] = {name: getattr(defaults, name) for name in SamplingParams.__struct_fields__}
    others: dict[str, Any] = {}
    for name, value in raw.parameters.items():
        if name in _RESERVED or name.startswith("triton_") or value is None:
            continue
        if (field := _ALIASES.get(name, name)) in _SAMPLING:  # a parameter `stop` is a stop string, not the switch
            settings[field] = value
        elif name in _SWITCHES or name in _OTHERS:
            others[name] = value
        else:
            raise BadRequest("INVALID_ARG", f"{name}: unknown request parameter")
    settings.update(_sampling_json(raw.inputs.get("sampling_parameters", [])))
    for name, values in raw.inputs.items():
        if name in _TEXTS or not values:
            continue
        if name in ("stop_words", "bad_words"):
            settings[_ALIASES.get(name, name)] = [_utf8(name, value) for value in values]
        elif name == "image":
            others[name] = [_utf8(name, value) for value in values]
        elif name == "embedding_request":
            others[name] = _text(name, values)
        elif name in _SWITCHES or name in _OTHERS:
            others[name] = _scalar(name, values)
        elif (field := _ALIASES.get(name, name)) in _SAMPLING:
            settings[field] = _scalar(name, values)
    return settings, others


def _sampling_json(values: list[Any]) -> dict[str, Any]:
    """The object in `sampling_parameters`; null means not given."""
    text = _text("sampling_parameters", values)
    if not text.strip():
        return {}
    given = _json("sampling_parameters: not a JSON object", text, dict[str, Any])
    for name in given:
        if name not in _SAMPLING:
            raise BadRequest("INVALID_ARG", f"sampling_parameters: unknown field `{name}`")
    return {name: value for name, value in given.items() if value is not None}


def _sampling(settings: dict[str, Any]) -> SamplingParams:
    """Convert and check; numbers may be strings ("0.1"), as vLLM's sample client and genai-perf send them."""
    settings = {name: value for name, value in settings.items() if value is not None}
    settings.setdefault("max_tokens", MAX_TOKENS)
    try:
        sampling = msgspec.convert(settings, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest("INVALID_ARG", f"sampling parameters: {error}") from error
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise BadRequest(
            "INVALID_ARG", f"min_tokens ({sampling.min_tokens}) must not exceed max_tokens ({sampling.max_tokens})"
        )
    if sampling.seed is not None and not -_UNSIGNED_64 // 2 <= sampling.seed < _UNSIGNED_64:
        raise BadRequest("INVALID_ARG", f"seed must fit in 64 bits, got {sampling.seed}")
    return sampling


def _refuse_unbuilt_sampling(sampling: SamplingParams) -> None:
    """Answer UNSUPPORTED for settings that are understood but not built."""
    for name in sampling.unbuilt:
        raise BadRequest("UNSUPPORTED", f"{name} = {getattr(sampling, name)!r} is not supported")


def _refuse_unbuilt(others: Mapping[str, Any], switch: Callable[[str], bool]) -> None:
    """The same for tensors that are no sampling parameters."""
    for name in ("return_logprobs", "return_cumulative_logprob", "return_log_probs"):
        if switch(name):
            raise BadRequest("UNSUPPORTED", f"{name} = true is not supported")
    if "beam_width" in others and (width := _convert("beam_width", others["beam_width"], int)) != 1:
        raise BadRequest("UNSUPPORTED", f"beam_width = {width} is not supported, only 1 is")
    if "length_penalty" in others and (penalty := _convert("length_penalty", others["length_penalty"], float)) != 1:
        raise BadRequest("UNSUPPORTED", f"length_penalty = {penalty} is not supported: it matters only for beams")
    if any(others.get("image", ())):
        raise BadRequest("UNSUPPORTED", "image is not supported: the model reads text only")
    if others.get("embedding_request"):
        raise BadRequest("UNSUPPORTED", "embedding_request is not supported: the model generates text only")


def _messages(text: str) -> list[dict[str, Any]]:
    """The chat in `text`: a JSON array of objects that have a role and a content."""
    wrong = "text_input: with apply_chat_template it must be a JSON array of messages"
    messages = _json(wrong, text, list[dict[str, Any]])
    if not messages:
        raise BadRequest("INVALID_ARG", "text_input: the array of messages is empty")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise BadRequest("INVALID_ARG", f"text_input: message {index} needs a `{key}` that is a string")
    return messages


def _json(wrong: str, text: str, kind: type[T]) -> T:
    """`text` as `kind`; `wrong` is the beginning of the message if it is none."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest("INVALID_ARG", f"{wrong}: {error}") from error
    except RecursionError as error:
        raise BadRequest("INVALID_ARG", f"{wrong}: it is nested too deeply") from error


def _convert(name: str, value: Any, kind: type[T]) -> T:
    """`value` as `kind`, numeric strings accepted."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest("INVALID_ARG", f"{name}: {error}") from error


def _scalar(name: str, values: list[Any]) -> Any:
    """The only value of a [1] tensor."""
    if len(values) != 1:
        raise BadRequest("INVALID_ARG", f"{name}: expected 1 value, got {len(values)}")
    return values[0]


def _text(name: str, values: list[Any]) -> str:
    """The only string of a [1] tensor; "" if there is none."""
    return _utf8(name, _scalar(name, values)) if values else ""


def _utf8(name: str, value: bytes) -> str:
    """Decode strictly: replacement characters would hide a client's mistake."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest("INVALID_ARG", f"{name}: not valid UTF-8 ({error.reason} at byte {error.start})") from error
