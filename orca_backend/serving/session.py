"""`Session`: one request on its way through the stub, from `execute` to its final response.

Who owns what: the tokenizer thread sets the prompt, the detokenizer thread the text; the responder thread alone sends.
They meet in the outbox, under the session's lock. The first end counts, later ones are ignored: so a request gets one
final response, whoever wanted to end it.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

import msgspec

from orca_backend.serving.detokenizer import Detokenizer
from orca_backend.serving.endpoint import Generation


class Failure(msgspec.Struct, frozen=True):
    """An error to answer: the name of a Triton error code, and a text for the user."""

    code: str
    message: str


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """What one response carries: new text, how many new tokens it stands for, and how the request ended if it did."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def is_final(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None or self.failure is not None


class Reply(Protocol):
    """The way back to the client of one request. Only the responder thread uses it."""

    def send(self, generation: Generation, parcel: Parcel, *, num_input_tokens: int) -> None:
        """Send a response, the last one if the parcel is final. May block on the server."""

    def refuse(self, failure: Failure) -> None:
        """Send an error as the last response."""

    def acknowledge(self) -> None:
        """Send one response with empty text as the last one."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone. Asks the server."""


class Session:
    """A request in flight. `deadline` is a value of time.monotonic()."""

    def __init__(self, session_id: int, generation: Generation, reply: Reply, timeout: float) -> None:
        """Begin now, with `timeout` seconds left."""
        self.id = session_id
        self.generation = generation
        self.reply = reply
        self.arrived = time.monotonic()
        self.deadline = self.arrived + timeout
        self.prompt = ""
        self.num_input_tokens = 0
        self.detokenizer: Detokenizer | None = None  # set before the engine knows of the request
        self.started = False  # has been in an iteration; this and the next are the detokenizer thread's
        self.last_token_at: float | None = None
        self._lock = threading.Lock()
        self._texts: list[str] = []
        self._num_tokens = 0
        self._finish_reason: str | None = None
        self._failure: Failure | None = None

    def has_ended(self) -> bool:
        """Whether an end is decided; the final response may still be on its way."""
        return self._finish_reason is not None or self._failure is not None

    @property
    def failure_code(self) -> str:
        """The code of the error that ended the request; "" if none did."""
        return self._failure.code if self._failure is not None else ""

    def put(self, text: str, num_tokens: int, finish_reason: str | None = None) -> bool:
        """Add output, and the end if there is one. False if the request had already ended."""
        with self._lock:
            if self.has_ended():
                return False
            self._texts.append(text)
            self._num_tokens += num_tokens
            self._finish_reason = finish_reason
            return True

    def fail(self, code: str, message: str) -> bool:
        """End with an error. False if the request had already ended."""
        with self._lock:
            if self.has_ended():
                return False
            self._failure = Failure(code, message)
            return True

    def spoil(self, message: str) -> None:
        """A part of the answer is lost: it ends with an error, also if it had ended well."""
        with self._lock:
            if self._failure is None:
                self._failure = Failure("INTERNAL", message)
                self._finish_reason = None
                self._texts.clear()
                self._num_tokens = 0

    def take(self) -> Parcel | None:
        """Everything that can be sent now, as one response; None if nothing can.

        A response that is not the last holds text, and only a stream has such.
        """
        with self._lock:
            if not self.has_ended() and not (self.generation.stream and any(self._texts)):
                return None
            parcel = Parcel(
                text="".join(self._texts),
                num_tokens=self._num_tokens,
                finish_reason=self._finish_reason,
                failure=self._failure,
            )
            self._texts.clear()
            self._num_tokens = 0
            return parcel
