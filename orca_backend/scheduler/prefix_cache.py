"""The prefix cache: full blocks of K/V found again by what stands in them and before them.

A block's name is the SHA-256 of its parent's name and its tokens; the first block's parent is the SHA-256 of tenant and
cache salt, so nobody finds what another tenant computed, nor can make a block that another's tokens would find.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from orca_backend.request import Sequence


class PrefixCache:
    """Which block holds which prefix, and which of these nobody uses now, least recently used first. O(1) a block."""

    def __init__(self, block_size: int) -> None:
        """Nothing is cached."""
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}  # by name
        self._names: dict[int, bytes] = {}  # by block
        self.unused: OrderedDict[int, None] = OrderedDict()
        self.queries = 0  # tokens of sequences that joined
        self.hits = 0  # of these, tokens that were found

    def __contains__(self, block: int) -> bool:
        """Whether `block` can be found by its name, hence must not be changed."""
        return block in self._names

    def find(self, seq: Sequence) -> list[int]:
        """The cached blocks that `seq` begins with."""
        found: list[int] = []
        for name in self._chain(seq, seq.num_tokens):
            if (block := self._blocks.get(name)) is None:
                break
            found.append(block)
        return found

    def count(self, seq: Sequence) -> int:
        """How many tokens of `seq` are in the cache."""
        return len(self.find(seq)) * self._block_size

    def record(self, seq: Sequence) -> None:
        """Let the full blocks of `seq` be found. What is cached already stays where it is: block tables only grow."""
        full = seq.num_computed // self._block_size
        first, seq.num_recorded = seq.num_recorded, full
        if first >= full:
            return
        names = self._chain(seq, seq.num_computed)
        for i in range(first, full):
            if names[i] not in self._blocks:
                self._blocks[names[i]] = seq.block_ids[i]
                self._names[seq.block_ids[i]] = names[i]

    def evict(self) -> int:
        """Forget the block that was unused for longest; its id."""
        block, _ = self.unused.popitem(last=False)
        del self._blocks[self._names.pop(block)]
        return block

    def _chain(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Names of the full blocks among the first `num_tokens` tokens of `seq` (and perhaps of more)."""
        names, size = seq.block_names, self._block_size
        if not names:
            request = seq.request
            tenant = request.tenant.encode()
            names.append(hashlib.sha256(b"%d:%b%b" % (len(tenant), tenant, request.cache_salt.encode())).digest())
        while len(names) * size <= num_tokens:
            tokens = array("q", seq.tokens((len(names) - 1) * size, len(names) * size))
            names.append(hashlib.sha256(names[-1] + tokens.tobytes()).digest())
        return names[1:]
