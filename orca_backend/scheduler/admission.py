"""Whether a sequence may start, and how many slots it takes at once: the `admission` part of the scheduler."""

from __future__ import annotations

from typing import Protocol

from orca_backend.request import Sequence
from orca_backend.scheduler.kv_manager import KVManager
from orca_backend.scheduler.pool import RequestPool


class Admission(Protocol):
    """Slots are asked for in tokens; what is not taken on starting is taken one block at a time, when it is needed."""

    def tokens(self, seq: Sequence) -> int:
        """Tokens for which `seq` takes blocks on starting: at least those it has."""
        ...

    def admits(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether `seq` may start now, which takes `num_blocks` blocks off the free ones."""
        ...


class Reservation:
    """All that a sequence can ever need, so that it never runs short: the paper's max_tokens, or a `limit` for all."""

    def __init__(self, kv: KVManager, limit: int | None = None) -> None:
        """`limit` is in tokens; None: every request's own max_tokens."""
        self._kv = kv
        self._limit = limit

    def tokens(self, seq: Sequence) -> int:
        """Prompt plus everything that may be generated, or the limit."""
        return self._limit or seq.max_tokens

    def admits(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether the whole reservation is free."""
        return num_blocks <= self._kv.n_free


class Prompt:
    """The whole input (for one that was preempted: with what it has generated), and a `watermark` while others run.

    Not only what the first chunk needs: a sequence that starts and soon runs short would start over and over.
    """

    def __init__(self, kv: KVManager, pool: RequestPool, watermark: float) -> None:
        """`watermark` is the share of all blocks that are left free for those that run to grow into."""
        self._kv = kv
        self._pool = pool
        self._watermark = int(watermark * kv.n_blocks)

    def tokens(self, seq: Sequence) -> int:
        """The tokens there are."""
        return seq.num_tokens

    def admits(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether the input is free, and the watermark."""
        return num_blocks + (self._watermark if self._pool.started else 0) <= self._kv.n_free


class Peak:
    """The input now, if at no time in the future all that have started need more slots than there are.

    Every sequence is taken to run to its own bound, one token per iteration, all in step: occupancy then only falls
    when one ends, so the ends are where it has to be checked (LightLLM's estimate). A last block that is not full is
    counted as full, but for a sequence that is alone.
    """

    def __init__(self, kv: KVManager, pool: RequestPool) -> None:
        """Watch `pool`."""
        self._kv = kv
        self._pool = pool

    def tokens(self, seq: Sequence) -> int:
        """The tokens there are."""
        return seq.num_tokens

    def admits(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether the highest future occupancy fits."""
        if not self._pool.started:
            return True  # what does not fit into an empty pool was refused when it came
        if num_blocks > self._kv.n_free:
            return False
        started, padding, n_slots = self._pool.started.values(), self._kv.block_size - 1, self._kv.n_slots
        bounds = [other.max_tokens for other in started]
        if sum(bounds) + seq.max_tokens + padding * (len(bounds) + 1) <= n_slots:
            return True  # they could even reserve it all
        ahead = [(other.max_tokens - other.num_tokens, other.num_tokens) for other in (*started, seq)]
        ahead.sort(reverse=True)
        held = 0
        for count, (iterations, num_tokens) in enumerate(ahead, 1):
            held += num_tokens + padding
            # The last iteration of this one: those before it in the list are there too, each as many tokens longer.
            if held + count * (iterations - 1) > n_slots:
                return False
        return True
