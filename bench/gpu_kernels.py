"""Every kernel in the Triton language against its specification, on random inputs of the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import torch

import orca_kernels
from orca_kernels import AttentionMetadata, dispatch, sampling
from orca_kernels.gpu import linear as gpu_linear
from orca_kernels.gpu.sampler_table import SamplerTable
from orca_kernels.gpu.sampling import sample
from orca_kernels.linear import WeightKind, dequantize_weight, quantize_weight

TOLERANCE = 5e-3  # ratio of root mean squares in 16 bits: a rounding of the result, and one of something before it

Check = tuple[str, Callable[[], float]]


def ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the error over that of what is expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def with_backend(backend: dispatch.Backend, operator: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """What `operator` gives with "triton" or "torch"."""
    dispatch.configure(backend)
    try:
        return operator(*arguments)
    finally:
        dispatch.configure()


def checks(device: torch.device, dtype: torch.dtype, hidden: int) -> Iterator[Check]:
    """Names, and what gives the error of each: a ratio of root mean squares, or a share of wrong tokens."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    def compared(operator: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Callable[[], float]:
        def error() -> float:
            expected = with_backend("torch", operator, *(tensor.float() for tensor in tensors))
            return ratio(with_backend("triton", operator, *(tensor.clone() for tensor in tensors)), expected)

        return error

    x, weight, bias = random(5, hidden), random(hidden), random(hidden)
    yield (
        "add + RMSNorm",
        compared(lambda x, r, w: orca_kernels.add_rms_norm(x, r, w, 1e-5), x, random(5, hidden), weight),
    )
    yield "RMSNorm, 1 + weight", compared(lambda x, w: orca_kernels.rms_norm(x, w, 1e-5, gemma=True), x, weight)
    yield (
        "add + LayerNorm",
        compared(lambda x, r, w, b: orca_kernels.add_layer_norm(x, r, w, b, 1e-5), x, random(5, hidden), weight, bias),
    )
    yield "SwiGLU", compared(orca_kernels.swiglu, random(5, 2 * hidden))
    yield "GeLU, tanh", compared(lambda x: orca_kernels.gelu(x, "tanh"), x)
    yield "GeLU, erf", compared(lambda x: orca_kernels.gelu(x, "none"), x)
    yield from _attention_checks(device, dtype, random)
    product = random(hidden // 2, hidden) / hidden**0.5
    for kind in (None, *get_args(WeightKind)):
        operand = product if kind is None else quantize_weight(product, kind)
        expanded = product.float() if kind is None else dequantize_weight(operand, torch.float32)
        for tokens in (1, 33):
            x = random(tokens, hidden)
            yield (
                f"linear, {kind or 'as it is'}, {tokens} tokens",
                lambda x=x, operand=operand, expanded=expanded: max(
                    ratio(gpu_linear.linear(x, operand, deterministic=mode), x.float() @ expanded.t())
                    for mode in (False, True)
                ),
            )
    yield "sampling: share of tokens unlike the CPU's", lambda: sampling_error(device)


def _attention_checks(device: torch.device, dtype: torch.dtype, random: Callable[..., torch.Tensor]) -> Iterator[Check]:
    """Attention in its phases, and the K/V write with rotary embedding."""
    block_size, dim, kv_heads, heads = 16, 64, 2, 6
    caches = random(40 * block_size, kv_heads, dim), random(40 * block_size, kv_heads, dim)
    phases = {"decode": ([1, 1, 1], [100, 15, 16]), "prefill": ([50, 17], [0, 0]), "mixed": ([1, 37, 20], [77, 0, 33])}
    for phase, (lengths, starts) in phases.items():
        blocks = torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(-1, 10).tolist()
        metadata = AttentionMetadata.build(lengths, starts, blocks[: len(lengths)], block_size, device)
        q = random(sum(lengths), heads, dim)

        def error(q: torch.Tensor = q, metadata: AttentionMetadata = metadata) -> float:
            arguments = (*caches, metadata, dim**-0.5)
            expected = orca_kernels.ragged_attention_reference(q.float(), *arguments)
            return ratio(with_backend("triton", orca_kernels.ragged_attention, q, *arguments), expected)

        yield f"attention, {phase}", error
    qkv, bias = random(9, (heads + 2 * kv_heads) * dim), random((heads + 2 * kv_heads) * dim)
    positions = torch.arange(9, device=device) * 7
    frequencies = 1 / 10000.0 ** (torch.arange(0, dim, 2, device=device).float() / dim)
    rope = orca_kernels.rope_cos_sin(positions, frequencies)
    slots = torch.tensor([3, 9, -1, 30, 31, 2, 1, 0, 17], device=device)

    def written(backend: dispatch.Backend, qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        pools = [torch.zeros(32, kv_heads, dim, device=device, dtype=qkv.dtype) for _ in range(2)]
        real = slots if backend == "triton" else slots[slots >= 0]
        rows = slice(None) if backend == "triton" else slots >= 0
        operator = lambda: orca_kernels.rope_and_write(  # noqa: E731
            qkv[rows], *pools, real, rope=(rope[0][rows], rope[1][rows]), bias_n=bias
        )
        q = with_backend(backend, operator)
        return torch.cat(
            [q[slots >= 0 if backend == "triton" else slice(None)].flatten(), *(p.flatten() for p in pools)]
        )

    yield (
        "bias + rotary embedding + K/V write",
        lambda: ratio(written("triton", qkv, bias), written("torch", qkv.float(), bias.float())),
    )


def sampling_error(device: torch.device, vocabulary: int = 5000) -> float:
    """The share of rows, of every kind of request, whose token is not the one of NumPy; 0 is right."""
    generator = np.random.default_rng(0)
    options = [
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for temperature in (0.7, 1.5)
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.95, 0.01))
    ]
    logits = generator.normal(0, 2, (len(options), vocabulary)).astype(np.float32)
    table = SamplerTable.empty(len(options), vocabulary, device)
    for slot, row in enumerate(options):
        penalties = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
        nothing = {"min_position": 0, "prompt_ids": [], "output_ids": [], "stop_ids": []}
        table.put(slot, **row, **penalties, **nothing, seed=slot)
    slots = torch.arange(len(options), dtype=torch.int32, device=device)
    positions = torch.full((len(options),), 9, device=device)
    tokens, _ = sample(torch.from_numpy(logits).to(device), slots, positions, table)
    expected = [
        sampling.sample(x, noise=sampling.uniform(seed, 9), **row)
        for seed, (x, row) in enumerate(zip(logits, options, strict=True))
    ]
    return float(np.mean(np.array(expected) != tokens.cpu().numpy()))
