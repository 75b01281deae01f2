"""Noticing that the server stops, from inside the stub.

Nobody tells a stub: it ignores signals, and `finalize` comes only when every response is gone. What can be seen is that
the server stops listening: its HTTP endpoint is closed before it waits for the models. So the listening sockets of the
server process are watched, and once one that was there is gone, what still runs has `drain_timeout` seconds left. But
Triton 2.51 closes none while an HTTP connection is open, so whoever has started the server also leaves a file.

To find them takes milliseconds, more on a machine with more connections; to see that they are still there takes
microseconds. So they are searched for only until no new ones come.

A server that crashes leaves its stubs behind, waiting: they end themselves when their parent is another.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PERIOD = 0.1  # seconds
SETTLED = 50  # looks without a new socket, after which none is expected: a server opens its endpoints one by one

Socket = tuple[str, str]  # the path of a file descriptor, and the socket that it stands for


def listening_sockets(pid: int) -> frozenset[Socket]:
    """The sockets on which process `pid` listens for TCP; empty if it is gone or is not ours to look at."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
        paths = [f"/proc/{pid}/fd/{c.fd}" for c in connections if c.status == psutil.CONN_LISTEN]
        return frozenset((path, os.readlink(path)) for path in paths)
    except (psutil.Error, OSError):  # the latter if one is just being closed: they all will be
        return frozenset()


def still_open(sockets: frozenset[Socket]) -> frozenset[Socket]:
    """Those of the sockets that are not closed."""

    def is_open(socket: Socket) -> bool:
        path, link = socket
        try:
            return os.readlink(path) == link
        except OSError:
            return False

    return frozenset(filter(is_open, sockets))


class DrainWatcher:
    """Calls `on_drain()` once, `drain_timeout` seconds after the process `pid` began to stop listening."""

    def __init__(
        self,
        pid: int,
        drain_timeout: float,
        on_drain: Callable[[], None],
        log: Callable[[str], None],
        *,
        sign: Path | None = None,
        period: float = PERIOD,
    ) -> None:
        """Start to watch. The file `sign` says the same as a socket that is closed."""
        self._pid = pid
        self._drain_timeout = drain_timeout
        self._on_drain = on_drain
        self._log = log
        self._sign = sign
        self._period = period
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        parent = os.getppid()
        seen: frozenset[Socket] = frozenset()
        unchanged = 0  # looks since a socket was new
        end: float | None = None  # of what still runs, once the server stops
        while not self._stopping.wait(self._period):
            if os.getppid() != parent:
                os._exit(1)  # the server crashed: Triton's stub would wait for it for ever, and the engine for the stub
            if end is not None:
                if time.monotonic() >= end:
                    end = math.inf
                    self._on_drain()
                continue
            sockets = listening_sockets(self._pid) if unchanged < SETTLED else still_open(seen)
            if not sockets.issuperset(seen) or (self._sign is not None and self._sign.exists()):
                end = time.monotonic() + self._drain_timeout
                self._log(f"the server is stopping; requests in flight have {self._drain_timeout:g} s")
            unchanged = unchanged + 1 if sockets and sockets == seen else 0
            seen = sockets
