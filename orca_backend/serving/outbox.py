"""`Outbox`: what is to be sent to one engine process, so that nobody has to wait until it reads.

The buffer of a socket is small and a prompt is not: with an engine that hangs, a send takes as long as that process
lives. Only the outbox's own thread sends.
"""

from __future__ import annotations

import queue
import threading

from orca_backend.channel import Channel, Message


class Outbox:
    """Sends over `channel` in the order of `put`. What it still holds when the other side is gone is dropped."""

    def __init__(self, channel: Channel) -> None:
        """Start the thread."""
        self._channel = channel
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine-writer", daemon=True).start()

    def put(self, message: Message) -> None:
        """Send a message soon. Never blocks; may be called from any thread."""
        self._messages.put(message)

    def close(self) -> None:
        """End the thread after what was put before. Does not wait for that."""
        self._messages.put(None)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._channel.send(message)
            except OSError:  # the reader sees the same end, and everybody is told by it
                return
