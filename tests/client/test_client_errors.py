from __future__ import annotations

import re

import pytest
from mock_prompts import MODEL, script

from orca_client import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    OrcaClient,
    OrcaError,
    Unavailable,
    Unsupported,
)
from orca_client.client import TokenStream
from orca_client.errors import error_from_message
from orca_client.protocol import build_request
from orca_client.retry import Attempts


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("message", "kind", "code"),
    [
        ("[INVALID_ARG] top_p must be in (0, 1], got 7", InvalidArgument, "INVALID_ARG"),
        ("[UNSUPPORTED] beam_width", Unsupported, "UNSUPPORTED"),
        ("[UNAVAILABLE] Exceeds maximum queue size", Unavailable, "UNAVAILABLE"),
        ("[CANCELLED] stopped by request", Cancelled, "CANCELLED"),
        ("[DEADLINE_EXCEEDED] took 3 s", DeadlineExceeded, "DEADLINE_EXCEEDED"),
        ("[UNAVAILABLE] Request timeout expired", DeadlineExceeded, "DEADLINE_EXCEEDED"),
        ("[UNAVAILABLE] Request timeout expired: its deadline cannot be met", DeadlineExceeded, "DEADLINE_EXCEEDED"),
        ("[UNAVAILABLE] Request timeout expired: it was not started within 4 seconds", Unavailable, "UNAVAILABLE"),
        ("[INTERNAL] NaN", Internal, "INTERNAL"),
        ("[NOT_FOUND] adapter", NotFound, "NOT_FOUND"),
        ("[ALREADY_EXISTS] id", OrcaError, "ALREADY_EXISTS"),
        ("something without a code\nin two lines", Internal, "INTERNAL"),
    ],
)
def test_coded_messages_become_typed_errors(client, message, kind, code, streaming):
    call = client.stream if streaming else client.generate
    with pytest.raises(OrcaError) as caught:
        list(call(script(fail_at=0, message=message), model=MODEL, request_id="coded"))
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert caught.value.message == re.sub(r"^\[[A-Z_]+\] ", "", message)
    assert caught.value.request_id == "coded"


def wrong_dtype(request):
    request.inputs[0].datatype = "UINT32"


def wrong_rank(request):
    request.inputs[0].shape[:] = [1, 1]


def wrong_shape(request):
    request.inputs[1].shape[:] = [2]


def wrong_bytes(request):
    request.raw_input_contents[0] = b"\x05"


def no_input(request):
    del request.inputs[:]
    del request.raw_input_contents[:]


def unknown_input(request):
    request.inputs[1].name = "nonsense"


def unknown_output(request):
    request.outputs.add(name="nonsense")


@pytest.mark.parametrize(
    "spoil",
    [wrong_dtype, wrong_rank, wrong_shape, wrong_bytes, no_input, unknown_input, unknown_output],
    ids=lambda f: f.__name__,
)
def test_what_the_core_rejects_is_an_invalid_argument(client, spoil):
    request = build_request(script("a"), model=MODEL, stream=True, sampling={})
    spoil(request)
    with pytest.raises(InvalidArgument) as caught:
        list(TokenStream(client._open_call, request, Attempts(0, 5)))
    assert caught.value.request_id == request.id
    assert request.id not in caught.value.message


def test_unknown_version_is_not_found(client):
    request = build_request(script("a"), model=MODEL, stream=True, sampling={})
    request.model_version = "99"
    with pytest.raises(NotFound):
        list(TokenStream(client._open_call, request, Attempts(0, 5)))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Server is stopping, scheduler for model has stopped accepting new inference requests", Unavailable),
        ("Exceeds maximum queue size", Unavailable),
        ("Request for unknown model: 'm' has no available versions", Unavailable),
        ("Request timeout expired", DeadlineExceeded),
    ],
)
def test_texts_of_the_core_that_need_a_stopping_or_full_server(text, kind):
    assert type(error_from_message(text)) is kind


def test_a_string_is_no_chat(client):
    """It was once sent as a prompt, without a template."""
    for chat in (client.chat, client.stream_chat):
        with pytest.raises(InvalidArgument, match="messages must be a list"):
            chat("What is gravity?")


def test_an_address_for_http_is_told_from_one_for_grpc():
    with pytest.raises(InvalidArgument, match=r"url: 'http://localhost:8000' is an address for HTTP"):
        OrcaClient("http://localhost:8000")
