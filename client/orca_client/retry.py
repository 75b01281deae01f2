"""When to try again: only what is safe and may help, a bounded number of times, within the deadline."""

from __future__ import annotations

import math
import random
import time

from orca_client.errors import DeadlineExceeded, InvalidArgument, OrcaError, Unavailable

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0

# The server's deadline should strike first, since its answer says more than a local one does.
DEADLINE_GRACE_S = 0.5

# Longer times are cut to this, 31 years. Both gRPC and Triton keep times as int64 of nanoseconds, gRPC since 1970: what
# ends after 2262 has ended for it already.
MAX_TIMEOUT_S = 10**9

# The longest wait for the server to end a stream after its last response; it takes milliseconds.
SETTLE_S = 2.0


class Attempts:
    """The tries of one request. Times are in seconds; `timeout` None or infinity is no deadline."""

    def __init__(self, retries: int, timeout: float | None) -> None:
        """The clock starts now. Raises InvalidArgument for a negative count or a time that is not positive."""
        if retries < 0:
            raise InvalidArgument(f"retries must be at least 0, got {retries}")
        if timeout is not None and not timeout > 0:
            raise InvalidArgument(f"timeout must be above 0 seconds, got {timeout}")
        self._retries_left = retries
        self._backoff = FIRST_BACKOFF_S
        self._timeout = None if timeout is None or timeout == math.inf else min(timeout, MAX_TIMEOUT_S)
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout

    def remaining(self) -> float | None:
        """Seconds until the deadline. Raises DeadlineExceeded if it has passed."""
        if self._deadline is None:
            return None
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(f"no answer within {self._timeout} s")
        return remaining

    def delay_after(self, error: OrcaError, received: bool) -> float | None:
        """Seconds to wait before the next try, or None to give up with `error`.

        Once a token has been `received` another try could contradict it, so there is none. The wait is drawn at random
        (full jitter) from an interval that doubles, so that the clients of a restarted server do not come back at once.
        """
        if received or self._retries_left == 0 or not isinstance(error, Unavailable):
            return None
        self._retries_left -= 1
        delay = random.uniform(0, self._backoff)
        self._backoff = min(2 * self._backoff, MAX_BACKOFF_S)
        if self._deadline is not None and time.monotonic() + delay >= self._deadline:
            return None
        return delay
