"""The book-keeping of the attention K/V manager (paper section 4.2): which blocks of slots belong to which sequence.

A slot holds K and V of one token. Slots are handed out in blocks of `block_size`; with a block size of 1 this is the
paper to the letter. When blocks are taken, and how many, is for the admission to say: all at once for a reservation, or
one by one. The tensors themselves live in the engine, which only ever sees block ids.
"""

from __future__ import annotations

from orca_backend.request import Sequence
from orca_backend.scheduler.prefix_cache import PrefixCache


class KVManager:
    """Takes and releases whole blocks, each in O(1): the free list is a stack.

    `n_slots` is what whole blocks offer, in tokens: the given number rounded down to a multiple of `block_size`.
    Blocks of a prefix cache that nobody uses count as free. Raises ValueError if there is not one block.
    """

    def __init__(self, n_slots: int, block_size: int, *, prefix_cache: bool = False) -> None:
        """Start with every block free."""
        self.n_blocks = n_slots // block_size
        if self.n_blocks < 1:
            raise ValueError(f"{n_slots} K/V slots do not hold one block of {block_size}")
        self.block_size = block_size
        self.n_slots = self.n_blocks * block_size
        self.cache = PrefixCache(block_size) if prefix_cache else None
        self.copies: list[tuple[int, int]] = []  # (from, to): to be copied before the next iteration writes
        self._free = list(range(self.n_blocks - 1, -1, -1))
        self._references = [0] * self.n_blocks

    @property
    def n_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self.cache.unused) if self.cache else len(self._free)

    @property
    def n_rsrv(self) -> int:
        """The paper's n_rsrv: slots reserved now. Derived from the free list, so the two cannot disagree."""
        return self.n_slots - self.n_free * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> tuple[list[int], int]:
        """Cached blocks that `seq` begins with, and how many fewer blocks have to be free for it to join.

        A found block that nobody else uses saves none: it counts as free until `seq` holds it. Nor does one that has to
        be copied because its last token is still to be computed: some token must be, for something to be sampled.
        """
        if self.cache is None:
            return [], 0
        found = self.cache.find(seq)
        whole = found[:-1] if len(found) * self.block_size == seq.num_tokens else found
        return found, sum(block not in self.cache.unused for block in whole)

    def start(self, seq: Sequence, num_tokens: int, prefix: list[int]) -> None:
        """Give `seq`, which holds nothing, blocks for `num_tokens` tokens, of which it shares `prefix`.

        The caller has seen that they are free. The tokens of `prefix` count as computed, but for the last token of
        `seq`; the block of that one is copied if it is shared (copy on write).
        """
        if self.cache is not None:
            seq.num_computed = min(len(prefix) * self.block_size, seq.num_tokens - 1)
            self.cache.queries += seq.num_tokens
            self.cache.hits += seq.num_computed
            whole = prefix[: seq.num_computed // self.block_size]
            for block in whole:
                self.cache.unused.pop(block, None)
                self._references[block] += 1
            seq.block_ids, seq.num_recorded = whole, len(whole)
        self.take(seq, num_tokens)
        if len(prefix) > seq.num_recorded:
            self.copies.append((prefix[-1], seq.block_ids[seq.num_recorded]))

    def take(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Give `seq` blocks up to `num_tokens` tokens; those it did not have. The caller saw that they are free."""
        missing = self.blocks_for(num_tokens) - len(seq.block_ids)
        free = self._free
        taken: list[int] = []
        for _ in range(missing):
            block = free.pop() if free else self._evict()
            self._references[block] = 1
            taken.append(block)
        seq.block_ids += taken
        seq.num_slots = len(seq.block_ids) * self.block_size
        return taken

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of `seq`, tails first. No iteration in flight may still write them."""
        references, cache = self._references, self.cache
        for block in reversed(seq.block_ids):
            references[block] -= 1
            if references[block]:
                continue
            if cache is not None and block in cache:
                cache.unused[block] = None
            else:
                self._free.append(block)
        seq.block_ids = []
        seq.num_slots = seq.num_recorded = 0

    def _evict(self) -> int:
        assert self.cache is not None
        return self.cache.evict()
