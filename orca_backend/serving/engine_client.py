"""The engine process as the stub sees it: spawned, supervised, spoken to over one channel.

When the process dies its end of the channel closes; the owner is told at once, and a new process is started, later and
later if it keeps dying. One that hangs is killed, and so dies too. The stub itself never loads the model, and nobody in
it waits for the engine to read: nothing that the engine does can take the stub down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from orca_backend.channel import (
    Cancel,
    Channel,
    EngineInfo,
    Heartbeat,
    IterationReport,
    Message,
    Ready,
    Shutdown,
    StartFailed,
    Submit,
)
from orca_backend.config import EngineConfig
from orca_backend.request import FinishReason, Request
from orca_backend.serving.outbox import Outbox

_STABLE = 10.0  # seconds after which an engine's death is no longer counted with the ones before it
_MAX_BACKOFF = 30.0
_GRACE = 5.0  # seconds that a process has to end by itself
_DEATH_GRACE = 1.0  # the same when its requests wait for their errors


class EngineUnavailable(Exception):
    """There is no engine that could take the request now."""


class EngineStartError(Exception):
    """The engine did not start; the message is for the operator."""


class Listener(Protocol):
    """Who is told what the engine says, on the client's own thread: it must be quick."""

    def on_report(self, report: IterationReport | Heartbeat) -> None:
        """An iteration returned, or the engine is alive."""

    def on_engine_died(self, message: str) -> None:
        """The engine is gone with all it knew; a new one is being started."""

    def on_engine_restarted(self, info: EngineInfo) -> None:
        """A new engine is ready."""


def find_python() -> str:
    """The interpreter to run the engine with: the one whose library is embedded here.

    An embedded interpreter guesses sys.executable from PATH: inside Triton's stub it may be another one, or empty.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for prefix in (sys.prefix, sys.base_prefix):
        if os.access(path := Path(prefix, "bin", name), os.X_OK):
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise EngineStartError(f"no {name} in {sys.prefix}/bin or on PATH to run the engine with")
    return found


def engine_command() -> list[str]:
    """The command that starts an engine process."""
    return [find_python(), "-m", "orca_backend.engine"]


def spawn_engine(config: EngineConfig, command: list[str] | None = None) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start an engine process, in a session of its own: its channel, on which it will say Ready, and the process.

    `command` is another program that speaks the channel. Raises EngineStartError.
    """
    command = command or engine_command()
    try:
        channel, fd = Channel.pair()
    except OSError as error:  # no file descriptors are left
        raise EngineStartError(f"no channel to the engine can be made: {error.strerror}") from error
    arguments = ["--fd", str(fd), "--config", msgspec.json.encode(config).decode(), "--parent", str(os.getpid())]
    try:
        process = subprocess.Popen(
            [*command, *arguments],
            pass_fds=[fd],
            env=_environment(config),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is not for it; it ends when the channel closes
        )
    except OSError as error:
        channel.close()
        raise EngineStartError(f"cannot run {command[0]}: {error.strerror}") from error
    finally:
        os.close(fd)
    return channel, process


def _environment(config: EngineConfig) -> dict[str, str]:
    """The child's environment: this interpreter's import path, and thread settings that count before torch loads.

    OMP_WAIT_POLICY: threads that spin while they wait would starve the stub and the server on shared cores.
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


class EngineClient:
    """Owns the engine process. `submit` and `cancel` may be called from any thread, and never block."""

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        log: Callable[[str], None],
        *,
        command: list[str] | None = None,
        first_backoff: float = 0.5,
    ) -> None:
        """Nothing runs before `start`. `command` is another program that speaks the channel."""
        self._config = config
        self._listener = listener
        self._log = log
        self._command = command
        self._first_backoff = first_backoff
        self._lock = threading.Lock()
        self._outbox: Outbox | None = None  # None: no engine that takes requests
        self._process: subprocess.Popen[bytes] | None = None
        self._why = "the engine is starting"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.restarts = 0

    def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises EngineStartError."""
        channel, info = self._spawn()
        self._outbox = Outbox(channel)
        self._thread = threading.Thread(target=self._supervise, args=(channel,), name="engine-reader", daemon=True)
        self._thread.start()
        return info

    def submit(self, request: Request) -> None:
        """Hand a request to the engine; if it dies before it has it, the listener is told. Raises EngineUnavailable."""
        with self._lock:
            outbox, why = self._outbox, self._why
        if outbox is None:
            raise EngineUnavailable(why)
        outbox.put(Submit(request))

    def cancel(self, request_id: int, reason: FinishReason = "cancelled") -> None:
        """Free what the request holds; nothing to do if there is no engine."""
        self._tell(Cancel(request_id, reason))

    def stop(self) -> None:
        """End the engine process and the thread."""
        self._stopping.set()
        while True:  # more than once only if it was just being restarted
            told = self._tell(Shutdown())
            self._reap(grace=_GRACE if told else 0.0)
            if self._thread is None or not self._thread.is_alive():
                return
            self._thread.join(timeout=1.0)

    @property
    def pid(self) -> int | None:
        """Process id of the engine, also while it starts."""
        process = self._process
        return process.pid if process is not None else None

    def _tell(self, message: Message) -> bool:
        """Whether there is an engine to tell."""
        with self._lock:
            outbox = self._outbox
        if outbox is None:
            return False
        outbox.put(message)
        return True

    def _spawn(self) -> tuple[Channel, EngineInfo]:
        """Start a process and wait for its first message. Raises EngineStartError."""
        channel, self._process = spawn_engine(self._config, self._command)
        # Without its process the channel reports EOF, so the time limit is a timer that kills the process.
        limit = self._config.limits.start_timeout
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._kill()

        timer = threading.Timer(limit, expire)
        timer.daemon = True
        timer.start()
        try:
            message = channel.receive()
        except msgspec.MsgspecError as error:
            channel.close()
            self._reap(grace=0.0)
            raise EngineStartError(f"the engine process says what cannot be understood: {error}") from error
        except EOFError:
            death = self._reap(grace=_GRACE)
            reason = f"it was not ready after {limit:g} s" if expired.is_set() else death
            channel.close()
            raise EngineStartError(f"the engine process did not start: {reason}; see the log") from None
        finally:
            timer.cancel()
        if isinstance(message, Ready):
            return channel, message.info
        channel.close()
        self._reap(grace=_GRACE)
        text = message.message if isinstance(message, StartFailed) else f"unexpected {type(message).__name__}"
        raise EngineStartError(text)

    def _supervise(self, channel: Channel) -> None:
        """Read until the engine dies, start another, and so on."""
        failures = 0
        while True:
            ready_at = time.monotonic()
            self._read(channel)
            with self._lock:
                outbox, self._outbox = self._outbox, None
                self._why = "the engine process died and is being restarted; try again"
            assert outbox is not None
            outbox.close()
            channel.close()
            if self._stopping.is_set():
                return
            death = self._reap(grace=_DEATH_GRACE)
            self._log(f"the engine process died ({death}); restarting it")
            self._listener.on_engine_died(f"the engine process died ({death}); it is being restarted, try again")
            failures = 0 if time.monotonic() - ready_at > _STABLE else failures + 1
            while True:
                # The first death is answered at once: it is the requests that wait, not the engine.
                doublings = min(failures - 2, 20)  # a power of two that an engine which is down for days keeps within
                delay = min(self._first_backoff * 2**doublings, _MAX_BACKOFF) if failures > 1 else 0.0
                if self._stopping.wait(delay):
                    return
                try:
                    channel, info = self._spawn()
                    break
                except EngineStartError as error:
                    failures += 1
                    self._log(f"the engine did not restart: {error}")
            self.restarts += 1
            with self._lock:
                self._outbox = Outbox(channel)
            self._listener.on_engine_restarted(info)

    def _read(self, channel: Channel) -> None:
        """Pass on what the engine says, until it is gone; kill it if it says nothing."""
        silence = self._config.limits.engine_silence
        while True:
            # Twice half the time: when the stub itself was suspended, with the engine, that is at most one of the two.
            if not (channel.wait(silence / 2) or channel.wait(silence / 2)):
                self._log(f"the engine has said nothing for {silence:g} s; killing it")
                self._reap(grace=_DEATH_GRACE, first=signal.SIGUSR1)  # if it still can, it writes what it has recorded
            try:
                message = channel.receive()
            except EOFError:
                return
            except msgspec.MsgspecError as error:
                self._log(f"the engine sent what cannot be understood: {error}")
                self._kill()
                continue
            if isinstance(message, IterationReport | Heartbeat):
                self._listener.on_report(message)

    def _kill(self) -> None:
        """Kill the engine and whatever it has started (its process group)."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _reap(self, *, grace: float, first: signal.Signals | None = None) -> str:
        """Wait for the process, perhaps with a signal `first`, kill what is left of its group, and say how it ended."""
        process = self._process
        if process is None:
            return "it never ran"
        if first is not None:
            process.send_signal(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        self._kill()
        code = process.wait()
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
