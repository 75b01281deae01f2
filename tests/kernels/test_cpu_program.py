"""The compiled program against the plain-torch decoder (whose oracle is transformers), and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import orca_kernels
from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.models.compiled import CompiledDecoder
from orca_backend.models.weights import load_decoder
from orca_kernels import AttentionMetadata, cpu

BLOCK = 32
LICENSE = Path(__file__).parents[2] / "LICENSE"
DTYPES = [torch.float32, torch.bfloat16]
QUANTIZED = ["int8", "int8_weight", "int4_weight"]

pytestmark = pytest.mark.skipif(
    cpu.obstacle(torch.float32) is not None, reason=f"no compiled kernels here: {cpu.obstacle(torch.float32)}"
)


class Sequences:
    """Sequences of random tokens that are fed to a decoder in any pieces, each in blocks of its own, out of order."""

    def __init__(self, decoder, kv: AttentionKV, count: int, vocabulary: int) -> None:
        self.decoder, self.kv = decoder, kv
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, vocabulary, (count, 384), generator=generator)
        order = torch.randperm(count * 12, generator=generator).tolist()
        self.blocks = [order[i * 12 : (i + 1) * 12] for i in range(count)]
        self.done = [0] * count

    def run(self, pieces: list[tuple[int, int]]) -> torch.Tensor:
        """Feed the next `length` tokens of each (sequence, length); logits after each piece, [pieces, vocabulary]."""
        lengths = [length for _, length in pieces]
        starts = [self.done[i] for i, _ in pieces]
        metadata = AttentionMetadata.build(lengths, starts, [self.blocks[i] for i, _ in pieces], BLOCK)
        ids = torch.cat([self.tokens[i, s : s + n] for (i, n), s in zip(pieces, starts, strict=True)])
        for i, length in pieces:
            self.done[i] += length
        return self.decoder(ids, metadata, self.kv, torch.tensor(lengths).cumsum(0) - 1)


@pytest.fixture(params=["tiny_llama", "tiny_gpt2"])
def checkpoint(request):
    return request.getfixturevalue(request.param)


def compiled(
    checkpoint,
    dtype: torch.dtype,
    count: int = 4,
    threads: int = 2,
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
) -> Sequences:
    decoder, spec = load_decoder(checkpoint, dtype)
    kv = AttentionKV(spec, count * 12 * BLOCK, kv_dtype or dtype, head_dim_multiple=cpu.LANES)
    return Sequences(CompiledDecoder(decoder, threads, cpu.Quantization(quantization)), kv, count, spec.vocab_size)


def plain(checkpoint, dtype: torch.dtype, count: int = 4, kv_dtype: torch.dtype | None = None) -> Sequences:
    decoder, spec = load_decoder(checkpoint, dtype)
    return Sequences(decoder, AttentionKV(spec, count * 12 * BLOCK, kv_dtype or dtype), count, spec.vocab_size)


def distance(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the reference."""
    return float((logits - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt())


MIXED = [
    [(0, 1), (1, 17), (2, 96), (3, 200)],
    [(0, 1), (1, 1), (2, 1), (3, 1)],
    [(2, 1), (0, 33), (3, 100), (1, 1)],
    [(3, 1), (0, 250)],
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_equal_the_plain_decoder(checkpoint, dtype):
    ours, oracle = compiled(checkpoint, dtype), plain(checkpoint, torch.float32)
    rounded = plain(checkpoint, dtype)
    for pieces in MIXED:
        exact = oracle.run(pieces)
        error, theirs = distance(ours.run(pieces), exact), distance(rounded.run(pieces), exact)
        assert error < 2e-6 if dtype == torch.float32 else error < 1.1 * theirs + 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_in_int8_are_those_of_the_plain_decoder(checkpoint, dtype):
    """Both round the same numbers but for the last bits, so a few fall on another step."""
    ours, theirs = (make(checkpoint, dtype, kv_dtype=torch.int8) for make in (compiled, plain))
    specification, exact = plain(checkpoint, torch.float32, kv_dtype=torch.int8), plain(checkpoint, torch.float32)
    for pieces in MIXED:
        expected = specification.run(pieces)
        loss = distance(expected, exact.run(pieces))
        assert 2e-3 < loss < 5e-2
        limit = 0.2 * loss if dtype == torch.float32 else 1.1 * distance(theirs.run(pieces), expected) + 2e-3
        assert distance(ours.run(pieces), expected) < limit


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_dtype"),
    [
        *((dtype, "none", kv_dtype) for dtype in DTYPES for kv_dtype in (dtype, torch.int8)),
        *((torch.bfloat16, quantization, torch.bfloat16) for quantization in QUANTIZED),
    ],
)
def test_a_row_does_not_depend_on_its_company_nor_on_how_its_prompt_is_cut(checkpoint, dtype, quantization, kv_dtype):
    alone = compiled(checkpoint, dtype, quantization=quantization, kv_dtype=kv_dtype)
    whole = alone.run([(3, 300)])
    after = alone.run([(3, 1)])
    company = compiled(checkpoint, dtype, threads=1, quantization=quantization, kv_dtype=kv_dtype)
    company.run([(0, 60), (3, 5), (1, 7)])
    company.run([(3, 1), (2, 200)])
    company.run([(1, 1), (3, 250), (0, 1)])
    assert torch.equal(company.run([(0, 9), (1, 1), (3, 44)])[2], whole[0])
    assert torch.equal(company.run([(3, 1), (2, 1), (0, 1)])[0], after[0])


@pytest.mark.parametrize(("dtype", "kv_dtype"), [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.int8)])
def test_unwritten_slots_never_reach_a_result(smollm2, dtype, kv_dtype):
    clean, poisoned = (compiled(smollm2, dtype, count=2, kv_dtype=kv_dtype) for _ in range(2))
    for tensor in poisoned.kv.tensors:
        tensor.fill_(-77 if tensor.dtype == torch.int8 else float("nan"))
    for pieces in ([(0, 1), (1, 17)], [(0, 1), (1, 1)], [(1, 40), (0, 33)], [(0, 1), (1, 1)]):
        assert torch.equal(clean.run(pieces), poisoned.run(pieces))


def test_smollm2_in_float32_gives_the_same_tokens(smollm2):
    ours, oracle = compiled(smollm2, torch.float32, count=2), plain(smollm2, torch.float32, count=2)
    for pieces in ([(0, 130), (1, 19)], [(0, 1), (1, 1)], [(1, 40), (0, 1)]):
        logits, exact = ours.run(pieces), oracle.run(pieces)
        assert torch.equal(logits.argmax(1), exact.argmax(1))
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-3)


def rounded(values: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """What remains of float32 rows [n, width] after rounding in groups: symmetric in 8 bits, least to most in 4."""
    group = cpu.GROUP if bits == 8 else 32
    groups = torch.nn.functional.pad(values, (0, -values.shape[1] % group)).view(len(values), -1, group)
    if bits == 8:
        scale = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 127
        return ((groups / scale).round() * scale).flatten(1)[:, : values.shape[1]]
    least, most = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scale = (most - least) / 15
    return (((groups - least) / scale).round() * scale + least).flatten(1)[:, : values.shape[1]]


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 100])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (112, 320), (576, 100), (1000, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantized_product_is_that_of_the_rounded_values(inputs, outputs, rows, quantization, dtype):
    """A program that only looks up, normalizes and multiplies, so that every step is known."""
    generator = torch.Generator().manual_seed(inputs)
    table = torch.randn(50, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    sizes = cpu.Dimensions(heads=1, kv_heads=1, head_dim=16, hidden=inputs, intermediate=16, vocabulary=outputs)
    program = cpu.Program(sizes, 0, dtype, 2)
    program.embed(table, None)
    program.norm(torch.ones(inputs), None, 1e-6)
    packed = cpu.pack_linear(weight, None, quantization=cpu.Quantization(quantization))
    program.linear(packed, cpu.Buffer.HIDDEN, cpu.Buffer.LOGITS)
    ids = torch.randint(0, 50, (rows,), generator=generator)
    metadata = AttentionMetadata.build([rows], [0], [list(range(4))], BLOCK)
    x = orca_kernels.rms_norm(table[ids].float(), torch.ones(inputs), 1e-6).to(dtype).float()
    full = x @ weight.float().t()
    if quantization == "int8":
        exact = rounded(x) @ rounded(weight.float()).t()
    else:
        coarse = rounded(weight.float(), 8 if quantization == "int8_weight" else 4)
        exact = x @ coarse.to(dtype).float().t()
    logits = program.run(ids, metadata, torch.arange(rows))
    # A value on the edge between two steps may fall on either side, hence a distance and not equality.
    scale = exact.pow(2).mean().sqrt()
    assert (logits - exact).pow(2).mean().sqrt() < 1e-3 * scale
    assert (full - exact).pow(2).mean().sqrt() > (3e-2 if quantization == "int4_weight" else 2e-3) * scale


def perplexity(checkpoint: Path, quantization: str, kv_dtype: torch.dtype) -> float:
    tokens = torch.tensor(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(LICENSE.read_text()).ids[:384])
    sequences = compiled(checkpoint, torch.bfloat16, count=1, quantization=quantization, kv_dtype=kv_dtype)
    metadata = AttentionMetadata.build([len(tokens)], [0], sequences.blocks, BLOCK)
    logits = sequences.decoder(tokens, metadata, sequences.kv, torch.arange(len(tokens)))
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).exp())


@pytest.fixture(scope="module")
def bfloat16_perplexity(smollm2) -> float:
    return perplexity(smollm2, "none", torch.bfloat16)


@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "loss"),
    [
        ("int8", torch.bfloat16, 0.02),
        ("int8_weight", torch.bfloat16, 0.01),
        ("int4_weight", torch.bfloat16, 0.02),
        ("none", torch.int8, 0.005),
    ],
)
def test_quantization_keeps_the_quality_of_smollm2(smollm2, bfloat16_perplexity, quantization, kv_dtype, loss):
    assert perplexity(smollm2, quantization, kv_dtype) == pytest.approx(bfloat16_perplexity, rel=loss)


def test_pools_of_another_dtype_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="K/V pools"):
        compiled(tiny_llama, torch.bfloat16, kv_dtype=torch.float32).run([(0, 1)])
