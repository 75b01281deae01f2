"""How many K/V slots fit beside the weights: what one iteration needs is measured, the rest is the pool's."""

from __future__ import annotations

import itertools

import torch

from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.device import Device
from orca_backend.models.decoder import Decoder
from orca_kernels.attention import AttentionMetadata
from orca_kernels.gpu.sampler_table import SamplerTable
from orca_kernels.gpu.sampling import sample


class OutOfDeviceMemoryError(ValueError):
    """The device is too small for the configuration; the message says what to lower."""


@torch.inference_mode()
def measure_iteration(
    device: Device, decoder: Decoder, kv_dtype: torch.dtype, *, block_size: int, max_tokens: int, max_bs: int
) -> int:
    """Bytes that the largest forward pass needs for a while: `max_tokens` tokens, `max_bs` of which sample.

    It writes no K/V and reads one block over and over.
    """
    spec = decoder.spec
    max_tokens = max(max_tokens, max_bs)
    kv = AttentionKV(spec, block_size, kv_dtype, device.device, block_size=block_size)
    length = min(max_tokens, spec.max_positions)
    starts = [*range(0, max_tokens, length), max_tokens]
    positions = torch.arange(max_tokens, device=device.device) % length
    lengths = [last - first for first, last in itertools.pairwise(starts)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device.device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device.device),
        block_table=torch.zeros(len(lengths), -(-length // block_size), dtype=torch.int32, device=device.device),
        slot_mapping=torch.full((max_tokens,), -1, device=device.device),
        positions=positions,
        block_size=block_size,
        query_lens=tuple(lengths),
        starts=(0,) * len(lengths),
        block_ids=(),
    )
    table = SamplerTable.empty(1, spec.vocab_size, device.device)
    slots = torch.zeros(max_bs, dtype=torch.int32, device=device.device)

    def run() -> None:
        logits = decoder(torch.zeros_like(positions), metadata, kv, torch.arange(max_bs, device=device.device))
        sample(logits, slots, positions[:max_bs], table)

    return device.measure(run)


def count_slots(
    free: int, iteration: int, table: int, *, bytes_per_token: int, block_size: int, longest: int, wanted: int | None
) -> int:
    """Slots of the K/V pool, in whole blocks, on a device with `free` bytes beside the weights.

    `iteration` bytes are needed twice, for passes without a graph and for graphs, whose memory is apart; `table` bytes
    by the sequences' state. `wanted`: slots that were asked for; None: all that fit. Raises OutOfDeviceMemoryError if
    those, or a sequence of `longest` tokens, do not fit.
    """
    left = free - 2 * iteration - table
    slots = max(0, left) // (bytes_per_token * block_size) * block_size
    if slots >= max(wanted or 0, longest):
        return wanted or slots
    gib = 1 << 30
    need, what = (wanted, f"{wanted} K/V slots") if wanted else (longest, f"a sequence of {longest} tokens")
    raise OutOfDeviceMemoryError(
        f"{what} need {(need or 0) * bytes_per_token / gib:.2f} GiB, but of {free / gib:.2f} GiB beside the weights "
        f"{2 * iteration / gib:.2f} go to iterations and {table / gib:.2f} to the state of sequences: lower "
        f"{'kv_cache.n_slots or kv_cache.memory' if wanted else 'limits.max_model_len'}, scheduler.max_bs or "
        "scheduler.token_budget, or use kv_cache.dtype: int8"
    )
