"""What happens to a sequence that loses its slots to another: the `preemption` part of the scheduler."""

from __future__ import annotations

from orca_backend.request import Sequence
from orca_backend.scheduler.kv_manager import KVManager


class Recompute:
    """Its K/V is lost, and computed again from prompt and output when it is its turn again."""

    def __init__(self, kv: KVManager) -> None:
        """Nobody is preempted."""
        self._kv = kv
        self.swapped_out: list[tuple[int, int]] = []  # (device block, host block), for the next iteration
        self.swapped_in: list[tuple[int, int]] = []  # (host block, device block), likewise

    def preempt(self, seq: Sequence) -> None:
        """Take the slots of `seq`, which is in no iteration in flight."""
        seq.num_computed = 0
        self._kv.release(seq)

    def restore(self, seq: Sequence) -> bool:
        """Fill the blocks of `seq`, which it has just been given, with what it had; False: there is nothing."""
        return False

    def forget(self, seq: Sequence) -> None:
        """`seq` will not come back, or not to what it had."""


class Swap(Recompute):
    """Its K/V is copied to host memory of `n_blocks` blocks and back; where that is full, it is computed again."""

    def __init__(self, kv: KVManager, n_blocks: int) -> None:
        """Start with all host blocks free. Raises ValueError if there are none."""
        super().__init__(kv)
        if n_blocks < 1:
            raise ValueError(f"the swap memory does not hold one block of {kv.block_size}")
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))

    def preempt(self, seq: Sequence) -> None:
        """Take the slots of `seq`; blocks that nothing was written to are not worth a copy."""
        blocks = seq.block_ids[: self._kv.blocks_for(seq.num_computed)]
        if not blocks or len(blocks) > len(self._free):
            super().preempt(seq)
            return
        seq.swapped_ids = [self._free.pop() for _ in blocks]
        self.swapped_out += zip(blocks, seq.swapped_ids, strict=True)
        self._kv.release(seq)

    def restore(self, seq: Sequence) -> bool:
        """Copy back what was copied out."""
        if not seq.swapped_ids:
            return False
        self.swapped_in += zip(seq.swapped_ids, seq.block_ids, strict=False)
        self._release(seq)
        return True

    def forget(self, seq: Sequence) -> None:
        """The host blocks of `seq` are free, and what it had computed is lost."""
        if seq.swapped_ids:
            seq.num_computed = 0
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self._free += seq.swapped_ids
        seq.swapped_ids = []
