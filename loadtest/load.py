"""What is to be sent, and what came of it: plain data that crosses from the driver to the load generator and back."""

from __future__ import annotations

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """One request. `prompt_tokens` counts the prompt as it is (without a chat's history and template).

    `max_tokens` is how much is generated, exactly: the end of the sequence is ignored. `pause` is the time in seconds
    between the answer to the turn before and this one.
    """

    prompt: str
    prompt_tokens: int
    max_tokens: int
    pause: float = 0.0


class Session(msgspec.Struct, frozen=True):
    """Turns that follow one another: mostly one. A chat's turns carry the messages and answers before them.

    `at` is when the first one is due, in seconds after the start of an open-loop load.
    """

    turns: list[Turn]
    at: float | None = None
    chat: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions for one model of one server.

    Sessions with a time (`at`) are an open loop: sent when due, whatever the server does. Without, they are a closed
    loop: `streams` of them at any time, the next one when one has ended. A closed loop with an end (`until`, seconds)
    begins the list again when it is at its end, and stops sending then; one without sends the list once.
    `timeout` (seconds) is for each request.
    """

    url: str
    sessions: list[Session]
    model: str = "orca"
    streams: int = 1
    until: float | None = None
    timeout: float = 600.0


class Record(msgspec.Struct, kw_only=True):
    """One request: times are in seconds after the start of the load.

    `times` and `tokens` have an entry for each event that brought tokens. `scheduled` is when the request was due (in a
    closed loop, when it was sent). `error` is empty for a request that ended well.
    """

    session: int = 0
    turn: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 0
    scheduled: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = []
    tokens: list[int] = []
    finish_reason: str = ""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(self.tokens)


class Outcome(msgspec.Struct, kw_only=True):
    """All requests of a load, in the order in which they were sent.

    `started` is the monotonic clock at the start. `wall` is the time until the last answer had ended, `cpu` the
    processor time that the generator took.
    """

    started: float
    wall: float
    cpu: float
    records: list[Record]
