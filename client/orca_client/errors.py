"""Typed errors. Where Triton says what went wrong decides how its code is found.

- An error that ends the RPC has a gRPC status.
- An error inside a stream is only a message and the request's id. Orca's own messages start with their code
  ("[INVALID_ARG] ..."); those of Triton's core do not, and are known by their texts.
"""

from __future__ import annotations

import re

import grpc


class OrcaError(Exception):
    """A request failed. `code` names why (INVALID_ARG, UNAVAILABLE, ...), `message` is for people.

    `request_id` is the id under which the server logged the request, or "".
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, code: str | None = None, request_id: str = "") -> None:
        """Without `code`, the class's own."""
        super().__init__(message)
        self.code = code or type(self).code
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        """The code and the message."""
        return f"[{self.code}] {self.message}"


class InvalidArgument(OrcaError, ValueError):
    """The request cannot be served as it is: a malformed, unknown or too large field. The message names it.

    Also what this package itself refuses to send, hence a ValueError too.
    """

    code = "INVALID_ARG"


class Unsupported(OrcaError):
    """The request is well formed but asks for what the server cannot do."""

    code = "UNSUPPORTED"


class Unavailable(OrcaError):
    """The server cannot be reached, is full, stops, or lost its engine. Worth another try, later or elsewhere."""

    code = "UNAVAILABLE"


class Cancelled(OrcaError):
    """The request was cancelled before it had finished."""

    code = "CANCELLED"


class DeadlineExceeded(OrcaError):
    """The request did not finish within its time."""

    code = "DEADLINE_EXCEEDED"


class Internal(OrcaError):
    """The server failed."""

    code = "INTERNAL"


class NotFound(OrcaError):
    """There is no such model, or no such version of it."""

    code = "NOT_FOUND"


_CLASSES: dict[str, type[OrcaError]] = {
    cls.code: cls
    for cls in (InvalidArgument, Unsupported, Unavailable, Cancelled, DeadlineExceeded, Internal, NotFound)
}

_CODE_OF_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_ARG",
    grpc.StatusCode.UNIMPLEMENTED: "UNSUPPORTED",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "UNAVAILABLE",  # how proxies say "full"
}

_PREFIX = re.compile(r"\[([A-Z_]+)\]\s*(.*)", re.DOTALL)

_REQUEST_ID = re.compile(r"\[request id: [^]]*\] ")  # put before some messages by the core

# Texts of Triton's core and Python backend, release 24.10. The first that matches wins.
_CODE_OF_TEXT = [
    (re.compile(pattern), code)
    for pattern, code in (
        (r"unknown model: .* (has no available versions|is not at ready state)", "UNAVAILABLE"),
        (r"unknown model: .* is not found", "NOT_FOUND"),
        (r"Server is stopping|[Ee]xceeds maximum queue size|not accepting|server exiting", "UNAVAILABLE"),
        (r"inference (input|output)|(byte size|shape) .*for input|expected .*inputs", "INVALID_ARG"),
        (r"[Rr]equest .*cancelled", "CANCELLED"),
    )
]


def error_from_code(code: str, message: str, request_id: str = "") -> OrcaError:
    """The error of the class that stands for `code`, or a plain OrcaError for a code without one.

    Triton has no code for a deadline of the server's: it says UNAVAILABLE, and the reason in the text. A request that
    waited too long in the queue was not late: there was no room for it.
    """
    if message.startswith("Request timeout expired") and "it was not started within" not in message:
        code = DeadlineExceeded.code
    return _CLASSES.get(code, OrcaError)(message, code=code, request_id=request_id)


def error_from_message(message: str, request_id: str = "") -> OrcaError:
    """The error for a message from inside a stream: by its prefix, else by its text, else Internal."""
    message = _REQUEST_ID.sub("", message, count=1)
    if match := _PREFIX.match(message):
        return error_from_code(match[1], match[2], request_id)
    code = next((code for pattern, code in _CODE_OF_TEXT if pattern.search(message)), "INTERNAL")
    return error_from_code(code, message, request_id)


def error_from_rpc(error: grpc.RpcError, request_id: str = "") -> OrcaError:
    """The error for an RPC that ended with a gRPC status. A prefix in the message is more precise than the status."""
    message = error.details() or ""
    if match := _PREFIX.match(message):
        return error_from_code(match[1], match[2], request_id)
    status = error.code()
    return error_from_code(_CODE_OF_STATUS.get(status, status.name), message or status.name, request_id)


def ended_early(cause: Exception, request_id: str) -> OrcaError:
    """The error for a stream that is over, with or without a gRPC error as `cause`, before its final response."""
    if isinstance(cause, grpc.RpcError):
        return error_from_rpc(cause, request_id)
    return Unavailable("the server ended the stream before the final response", request_id=request_id)
