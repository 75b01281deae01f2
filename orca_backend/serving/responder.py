"""The responder thread: the only one that sends, and the one that notices clients that left and deadlines that passed.

`send` of Triton's Python backend blocks for a round trip to the server, so it must be nowhere near the engine. What a
request has to say while another is being sent becomes one response.
"""

from __future__ import annotations

import collections
import functools
import queue
import threading
import time
from collections.abc import Callable

from orca_backend.serving.session import Failure, Reply, Session

# Seconds between two looks at every request. Each is a round trip to the server, so with 32 requests there are about as
# many looks as tokens; but a client that left must be noticed within 0.1.
CYCLE = 0.07
_SLICE = 16  # requests looked at between two chances to send

Job = Callable[[], None]


class Responder:
    """Answers the requests of one model.

    `on_abandoned(session)` is called when it ends a session by itself (client gone, deadline passed), and
    `on_closed(session)` after the final response of every session that was opened, both on its own thread.
    """

    def __init__(
        self,
        on_abandoned: Callable[[Session], None],
        on_closed: Callable[[Session], None],
        log: Callable[[str], None],
        *,
        cycle: float = CYCLE,
    ) -> None:
        """Start the thread."""
        self._on_abandoned = on_abandoned
        self._on_closed = on_closed
        self._log = log
        self._cycle = cycle
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: dict[int, Session] = {}  # this thread's only
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        self._thread.start()

    def open(self, session: Session) -> None:
        """Watch over a new request until it has ended. Before any `wake` for it."""
        self._jobs.put(lambda: self._open.__setitem__(session.id, session))

    def wake(self, *sessions: Session) -> None:
        """There may be something to send for these requests; for many at once it costs one change of threads."""
        self._jobs.put(lambda: self._deliver_all(sessions))

    def refuse(self, reply: Reply, failure: Failure) -> None:
        """Answer a request that never became a session."""
        self._jobs.put(lambda: reply.refuse(failure))

    def acknowledge(self, reply: Reply) -> None:
        """Answer a `stop` request."""
        self._jobs.put(reply.acknowledge)

    def close(self) -> None:
        """Send what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Send what is ready; in turn with that, look at every open request once per cycle."""
        unseen: collections.deque[Session] = collections.deque()
        next_look = time.monotonic() + self._cycle
        while self._send_ready(0.0 if unseen else max(next_look - time.monotonic(), 0.0)):
            for _ in range(min(_SLICE, len(unseen))):
                self._guard(functools.partial(self._look_at, unseen.popleft()))
            if not unseen and time.monotonic() >= next_look:
                next_look = time.monotonic() + self._cycle
                unseen.extend(self._open.values())

    def _send_ready(self, patience: float) -> bool:
        """Wait up to `patience` seconds for a job, then do what is queued by then. False: it is time to end."""
        try:
            job = self._jobs.get(timeout=patience) if patience else self._jobs.get_nowait()
            for left in range(self._jobs.qsize(), -1, -1):  # not until it is empty: looking has its turn under load
                if job is None:
                    return False
                self._guard(job)
                if left:
                    job = self._jobs.get_nowait()
        except queue.Empty:
            pass
        return True

    def _guard(self, job: Job) -> None:
        """One request's trouble must not be the others'."""
        try:
            job()
        except Exception as error:
            self._log(f"a response could not be sent: {type(error).__name__}: {error}")

    def _look_at(self, session: Session) -> None:
        if session.id not in self._open or session.has_ended():
            return
        if session.reply.is_cancelled():
            ended = session.fail("CANCELLED", "the client has cancelled the request")
        elif time.monotonic() >= session.deadline:
            ended = session.fail("UNAVAILABLE", "Request timeout expired")
        else:
            return
        if ended:
            self._on_abandoned(session)
            self._deliver(session)

    def _deliver_all(self, sessions: tuple[Session, ...]) -> None:
        for session in sessions:
            self._guard(functools.partial(self._deliver, session))

    def _deliver(self, session: Session) -> None:
        if session.id not in self._open or (parcel := session.take()) is None:
            return
        try:
            session.reply.send(session.generation, parcel, num_input_tokens=session.num_input_tokens)
        except Exception as error:
            if not parcel.is_final:
                session.spoil(f"a part of the answer could not be sent: {type(error).__name__}: {error}")
                self._on_abandoned(session)
                self._deliver(session)
            raise
        finally:
            if parcel.is_final:
                del self._open[session.id]
                self._on_closed(session)
