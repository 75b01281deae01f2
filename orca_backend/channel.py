"""The request channel between the Triton stub and the engine process: typed messages over one socket pair.

Either side learns of the other's death at once: `receive` raises EOFError.
"""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

import msgspec

from orca_backend.request import FinishReason, Request, TokenEvent
from orca_backend.scheduler.iteration import Occupancy


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Stub to engine: serve this request."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stub to engine: stop this request and free what it holds. Unknown or finished ids are ignored.

    `reason` is "stop" if its text is complete, which only the stub can see: a stop string was found.
    """

    request_id: int
    reason: FinishReason = "cancelled"


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stub to engine: end the process."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is, once loaded. Sizes in tokens, `weight_bytes` and `kv_bytes` in bytes."""

    model_name: str
    architecture: str
    dtype: str
    device: str
    kernels: str = "torch"
    quantization: str = "none"
    policy: str
    max_model_len: int
    max_bs: int
    n_workers: int
    n_slots: int
    block_size: int
    vocab_size: int
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine to stub: the model is loaded, requests may come."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """Engine to stub: the engine cannot start, and why. The process then ends with exit code 1."""

    message: str


class IterationReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to stub, once per returned iteration: its size, its times in seconds, and the tokens it gave.

    It was `started` at a value of time.monotonic(), and the requests `joined` had their first row in it, or their first
    one after they were preempted.
    `events` may also be non-empty with `num_rows` 0 when requests end outside an iteration (a cancel while waiting).
    """

    iteration_id: int = 0
    num_rows: int = 0
    num_prefill_rows: int = 0
    num_tokens: int = 0
    started: float = 0.0
    joined: list[int] = []
    schedule_seconds: float = 0.0
    run_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    events: list[TokenEvent] = []
    occupancy: Occupancy = Occupancy()


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Engine to stub, several times a second also when idle."""

    occupancy: Occupancy


ToEngine = Submit | Cancel | Shutdown
FromEngine = Ready | StartFailed | IterationReport | Heartbeat
Message = ToEngine | FromEngine

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of the request channel. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: Connection) -> None:
        """Take over an open stream connection."""
        self._connection = connection
        self._send_lock = threading.Lock()

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over the socket with file descriptor `fd` (inherited by a child process)."""
        return cls(Connection(fd))

    @classmethod
    def pair(cls) -> tuple[Channel, int]:
        """A new channel: one end, and the inheritable file descriptor of the other for a child's `pass_fds`."""
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        return cls(Connection(ours.detach())), theirs.detach()

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError (BrokenPipeError) if the other side is gone.

        Blocks while the other side does not read and the socket's buffer is full.
        """
        data = _encoder.encode(message)
        with self._send_lock:
            self._connection.send_bytes(data)

    def wait(self, seconds: float) -> bool:
        """Wait for the next message, or for the end, up to `seconds`. False: nothing came."""
        return self._connection.poll(seconds)

    def receive(self) -> Message:
        """Wait for the next message. Raises EOFError when the other side is gone."""
        try:
            return _decoder.decode(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """Close this end; the other side's `receive` then raises EOFError."""
        with self._send_lock:
            self._connection.close()
