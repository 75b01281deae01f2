"""The model's contract as protobuf messages: build the request of a generation, read its responses.

No I/O, so that the two clients differ only in how they wait.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tritonclient.grpc import InferResult, service_pb2

from orca_client.errors import Internal, InvalidArgument, error_from_message
from orca_client.types import Completion, Event, Finished, Message, TextDelta

_FLAGS = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")


@contextlib.contextmanager
def _refusing_what_has_no_form() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise InvalidArgument(f"cannot be sent: {error}") from error


@_refusing_what_has_no_form()
def build_request(
    prompt: str | Sequence[Message],
    *,
    model: str,
    stream: bool,
    sampling: Mapping[str, Any],
    request_id: str | None = None,
) -> service_pb2.ModelInferRequest:
    """The request for one generation. A list of messages as `prompt` goes through the server's chat template.

    Options that are None are left out. Raises InvalidArgument for text that has no UTF-8 form and for messages and
    options that have no JSON form; everything else is for the server to judge.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id or uuid.uuid4().hex)
    # A model may end a request without a last content response; the client must still hear of the end.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    options = {name: value for name, value in sampling.items() if value is not None}
    _add_text(request, "text_input", prompt if isinstance(prompt, str) else json.dumps(list(prompt)))
    _add_text(request, "sampling_parameters", json.dumps(options))
    _add_flag(request, "stream", stream)
    for name in _FLAGS:
        _add_flag(request, name, True)
    if not isinstance(prompt, str):
        _add_flag(request, "apply_chat_template", True)
    return request


@_refusing_what_has_no_form()
def model_ready_request(model: str) -> service_pb2.ModelReadyRequest:
    """The question whether `model` can be used. Raises InvalidArgument for a name that has no UTF-8 form."""
    return service_pb2.ModelReadyRequest(name=model)


def check_url(url: str) -> None:
    """Raise InvalidArgument for what gRPC would take for an address, or choke on, but is none: "", not UTF-8, http://."""
    try:
        empty = not url.encode().strip()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"url: {error}") from error
    if empty:
        raise InvalidArgument("url is empty; it is host:port of the server's gRPC endpoint")
    if re.match(r"https?://", url):
        raise InvalidArgument(f"url: {url!r} is an address for HTTP; it is host:port of the server's gRPC endpoint")


def check_messages(messages: str | Sequence[Message]) -> None:
    """Raise InvalidArgument for a string, which would be sent as a prompt without a template."""
    if isinstance(messages, str):
        raise InvalidArgument('messages must be a list of {"role": ..., "content": ...}, not a string')


def set_timeout(request: service_pb2.ModelInferRequest, seconds: float) -> None:
    """Tell the server how long the request may take."""
    request.parameters["timeout"].int64_param = max(1, int(seconds * 1e6))  # Triton's unit: microseconds


def _add_text(request: service_pb2.ModelInferRequest, name: str, text: str) -> None:
    data = text.encode()
    request.inputs.add(name=name, datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(data)) + data)


def _add_flag(request: service_pb2.ModelInferRequest, name: str, value: bool) -> None:
    request.inputs.add(name=name, datatype="BOOL", shape=[1])
    request.raw_input_contents.append(bytes([value]))


class ResponseReader:
    """Turns the responses of one stream into events and keeps the totals."""

    def __init__(self, request_id: str) -> None:
        """For the responses of the request with this id."""
        self._request_id = request_id
        self._finish_reason = "unknown"  # of a server that ends a request without saying why
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        self.received = False  # whether any text or token has come
        self.ended = False  # whether this was the last response: the final one, or an error

    def read(self, response: service_pb2.ModelStreamInferResponse) -> list[Event]:
        """The events in one response. Raises OrcaError if it is an error, or does not keep to the contract."""
        if response.error_message:
            self.ended = True
            raise error_from_message(response.error_message, self._request_id)
        result = InferResult(response.infer_response)
        try:
            text = "".join(part.decode() for part in self._output(result, "text_output"))
        except UnicodeDecodeError as error:
            raise Internal(f"text_output is not UTF-8: {error}", request_id=self._request_id) from error
        num_tokens = sum(int(count) for count in self._output(result, "num_output_tokens"))
        for count in self._output(result, "num_input_tokens"):
            self._num_input_tokens = int(count)
        for reason in self._output(result, "finish_reason"):
            if reason != b"None":  # until the last response
                self._finish_reason = reason.decode()
        self._num_output_tokens += num_tokens
        self.ended = response.infer_response.parameters["triton_final_response"].bool_param
        events: list[Event] = []
        if text or num_tokens:
            self.received = True
            events.append(TextDelta(text, num_tokens))
        if self.ended:
            events.append(Finished(self._finish_reason, self._num_input_tokens, self._num_output_tokens))
        return events

    @staticmethod
    def _output(result: InferResult, name: str) -> Sequence[Any]:
        values = result.as_numpy(name)
        return () if values is None else values.reshape(-1)


def collect(events: Sequence[Event], request_id: str) -> Completion:
    """The completion that a whole stream of events amounts to."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    (end,) = (event for event in events if isinstance(event, Finished))
    return Completion(text, end.finish_reason, end.num_input_tokens, end.num_output_tokens, request_id)
