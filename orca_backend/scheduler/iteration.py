"""What the scheduler and the execution engine say to each other: plain data that could cross a network.

Differences, not states: a sequence is described in full in the iteration in which it joins, afterwards only by its id.
"""

from __future__ import annotations

import msgspec

from orca_backend.request import SamplerSettings


class JoiningSequence(msgspec.Struct, frozen=True, kw_only=True):
    """All that a runner must know of a sequence before its first row. `stop_token_ids` serve min_tokens.

    `output_ids` has been generated already where a sequence joins again after preemption.
    """

    request_id: int
    prompt_ids: list[int]
    block_ids: list[int]
    stop_token_ids: list[int]
    sampling: SamplerSettings
    output_ids: list[int] = []


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of consecutive tokens of one sequence in one iteration.

    `start` is the position of the first of them (tokens before it have their K/V in the cache). `sample` says whether
    a token is to be sampled after the last one (false for a prompt chunk that is not the last, and for inactive rows).
    """

    request_id: int
    start: int
    num_tokens: int
    sample: bool = True


class IterationBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of the model over a set of sequences.

    `token_ids` is flat, in the order of `rows`: its length is the sum of their `num_tokens`. `joining` come with their
    first row. `new_blocks` extends block tables of sequences that have joined before. `dropped` are ids whose state the
    runner can forget before it runs this iteration.

    Before the iteration writes anything, blocks are copied, as pairs (from, to): those of `swapped_out` from the K/V
    pool to the swap memory, then those of `copied` within the pool, then those of `swapped_in` back.
    """

    iteration_id: int
    rows: list[Row]
    token_ids: list[int]
    joining: list[JoiningSequence] = []
    new_blocks: dict[int, list[int]] = {}
    dropped: list[int] = []
    swapped_out: list[tuple[int, int]] = []
    copied: list[tuple[int, int]] = []
    swapped_in: list[tuple[int, int]] = []


class IterationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration returned. `sampled` has one entry per row: the token id, or -1 where none was sampled.

    `failed` maps a request id to the reason for which this request alone cannot go on (for example NaN logits).
    `seconds` is the time the runner took; of it, `forward_seconds` went into the model and `sample_seconds` came after.
    """

    iteration_id: int
    sampled: list[int]
    failed: dict[int, str] = {}
    seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """How full the engine is, and what has been counted since it started.

    `slots_*` in tokens; blocks that only the prefix cache holds are not reserved. `running` counts sequences that hold
    slots, `waiting` those that do not, those that were preempted among them. `preemptions`, `prefix_queries` and
    `prefix_hits` (tokens looked up and found) only grow.
    """

    running: int = 0
    waiting: int = 0
    slots_reserved: int = 0
    slots_used: int = 0
    slots_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
