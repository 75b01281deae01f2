"""The GPU runner on CPU tensors: its own code, the kernels under the interpreter, calls in the place of graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.decode_graphs import bucket_sizes
from orca_backend.engine.device import HostDevice
from orca_backend.engine.gpu_runner import GpuRunner, passes
from orca_backend.engine.memory_profile import OutOfDeviceMemoryError, count_slots, measure_iteration
from orca_backend.engine.runner import ModelRunner
from orca_backend.engine.sampler import NumpySampler
from orca_backend.engine.sequence_table import PENDING
from orca_backend.models.decoder import Decoder
from orca_backend.models.layers import Linear
from orca_backend.models.spec import ModelSpec, RopeSpec
from orca_backend.request import SamplerSettings
from orca_backend.scheduler.iteration import IterationBatch, JoiningSequence, Row
from orca_kernels import dispatch
from tests.engine.launch_keys import recorded_launches

BLOCK_SIZE = 16
SPEC = ModelSpec(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=90, hidden_size=64, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=64, intermediate_size=48, max_positions=96, norm="rms", norm_eps=1e-5,
    activation="swiglu", rope=RopeSpec(kind="default", theta=10000.0), qkv_bias=False, out_bias=False, mlp_bias=False,
    tie_embeddings=True, eos_token_ids=(),
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(SPEC)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    decoder.place("cpu")
    return decoder.eval()


@pytest.fixture(autouse=True)
def triton_backend() -> Iterator[None]:
    dispatch.configure("triton")
    yield
    dispatch.configure()


def make_runner(decoder: Decoder, max_bs: int = 3, max_tokens: int = 64) -> GpuRunner:
    kv = AttentionKV(SPEC, 32 * BLOCK_SIZE, torch.float32, block_size=BLOCK_SIZE)
    for tensor in kv.tensors:
        tensor.fill_(float("nan"))  # what nobody wrote must never be part of a computation
    return GpuRunner(
        HostDevice(), decoder, kv, block_size=BLOCK_SIZE, max_bs=max_bs, max_sequences=max_bs, max_model_len=64,
        max_tokens=max_tokens,
    )  # fmt: skip


@pytest.fixture(scope="module")
def served(decoder: Decoder) -> Iterator[tuple[GpuRunner, set, set]]:
    """A runner that the tests share; the launches of its making, and all launches so far."""
    dispatch.configure("triton")
    with recorded_launches() as keys:
        runner = make_runner(decoder, max_bs=5, max_tokens=80)
        yield runner, set(keys), keys


@pytest.fixture
def sequences(served: tuple[GpuRunner, set, set], decoder: Decoder) -> Iterator[Sequences]:
    sequences = Sequences(served[0], decoder)
    yield sequences
    everybody = IterationBatch(iteration_id=0, rows=[], token_ids=[], dropped=list(sequences.tokens))
    served[0]._table.admit(everybody)


class Sequences:
    """Batches over some sequences, and the tokens that plain torch and NumPy give for the same ones."""

    def __init__(self, runner: GpuRunner, decoder: Decoder) -> None:
        self.runner = runner
        kv = AttentionKV(SPEC, 32 * BLOCK_SIZE, torch.float32, block_size=BLOCK_SIZE)
        sampler = NumpySampler(SPEC.vocab_size)
        self.specified = ModelRunner(decoder, kv, sampler, block_size=BLOCK_SIZE, device=torch.device("cpu"))
        self.iteration = 0
        self.tokens: dict[int, list[int]] = {}

    def joining(self, request_id: int, prompt: list[int], **sampling: object) -> JoiningSequence:
        self.tokens[request_id] = list(prompt)
        blocks = [(4 * request_id + i) % 32 for i in (2, 0, 3, 1)]
        return JoiningSequence(
            request_id=request_id, prompt_ids=prompt, block_ids=blocks, stop_token_ids=[3],
            sampling=SamplerSettings(**sampling),
        )  # fmt: skip

    def batch(self, rows: list[Row], **news: object) -> IterationBatch:
        self.iteration += 1
        ids = [token for row in rows for token in self.tokens[row.request_id][row.start : row.start + row.num_tokens]]
        return IterationBatch(iteration_id=self.iteration, rows=rows, token_ids=ids, **news)

    def decode(self, *request_ids: int) -> list[Row]:
        return [Row(i, len(self.tokens[i]) - 1, 1) for i in request_ids]

    def prefill(self, *request_ids: int) -> list[Row]:
        return [Row(i, 0, len(self.tokens[i])) for i in request_ids]

    def run(self, rows: list[Row], **news: object) -> list[int]:
        """Both, and their agreement."""
        batch = self.batch(rows, **news)
        sampled = self.runner.run(batch).sampled
        dispatch.configure("torch")
        assert sampled == self.specified.run(batch).sampled
        dispatch.configure("triton")
        for row, token in zip(rows, sampled, strict=True):
            if row.sample:
                self.tokens[row.request_id].append(token)
        return sampled


SAMPLING = [{}, {"temperature": 1.0, "seed": 4, "min_tokens": 3}, {"temperature": 0.8, "top_k": 9, "seed": 5,
            "frequency_penalty": 0.7, "repetition_penalty": 1.2}]  # fmt: skip


def test_tokens_are_those_of_plain_torch_in_any_mixture_of_rows(sequences):
    prompts = [[5, 6, 7, 8], [9] * 17, [11]]
    join = [sequences.joining(i, prompt, **SAMPLING[i]) for i, prompt in enumerate(prompts)]
    sequences.run(sequences.prefill(0, 2), joining=[join[0], join[2]])
    sequences.run([*sequences.decode(2, 0), *sequences.prefill(1)], joining=[join[1]])  # all kinds of rows at once
    for order in ((0, 1, 2), (2, 0), (1,), (1, 2, 0)):  # in graphs of 4, 2 and 1
        sequences.run(sequences.decode(*order))
    again = sequences.joining(3, [12, 13], **SAMPLING[2])  # takes the slot of one that leaves
    sequences.run([*sequences.decode(0, 1), *sequences.prefill(3)], joining=[again], dropped=[2])
    sequences.run(sequences.decode(3, 1))


def test_an_iteration_takes_the_tokens_of_the_last_from_the_device(sequences):
    """Three iterations are launched before the first is looked at; the host says PENDING where it cannot know."""
    join = sequences.joining(0, [5, 6, 7], **SAMPLING[1])
    sequences.run(sequences.prefill(0), joining=[join])
    first = sequences.batch(sequences.decode(0))
    join = sequences.joining(1, [8, 9], **SAMPLING[2])
    rows = [Row(0, 4, 1), Row(1, 0, 2)]
    mixed = IterationBatch(iteration_id=8, rows=rows, token_ids=[PENDING, 8, 9], joining=[join])
    both = IterationBatch(iteration_id=9, rows=[Row(1, 2, 1), Row(0, 5, 1)], token_ids=[PENDING, PENDING])
    launched = [sequences.runner.launch(batch) for batch in (first, mixed, both)]
    actual = [pending.wait().sampled for pending in launched]
    dispatch.configure("torch")
    expected = [sequences.specified.run(first).sampled]
    for batch, ids in ((mixed, lambda: [expected[0][0], 8, 9]), (both, lambda: expected[1][::-1])):
        told = IterationBatch(iteration_id=1, rows=batch.rows, token_ids=ids(), joining=batch.joining)
        expected.append(sequences.specified.run(told).sampled)
    assert actual == expected


def test_logits_that_are_not_finite_fail_their_row_alone(sequences):
    join = [sequences.joining(i, [5, 6, 7 + i]) for i in range(2)]
    sequences.run(sequences.prefill(0, 1), joining=join)
    blocks = sequences.runner._table.block_ids[0]
    for layer in sequences.runner._kv.layers:
        layer.keys[blocks[0] * BLOCK_SIZE] = float("nan")
    batch = sequences.batch(sequences.decode(0, 1))
    result = sequences.runner.run(batch)
    assert result.sampled[0] == -1
    assert result.sampled[1] >= 0
    assert "finite" in result.failed[0]
    assert list(result.failed) == [0]


def test_rows_of_padding_write_nothing(sequences):
    join = [sequences.joining(i, [5, 6 + i]) for i in range(3)]
    sequences.run(sequences.prefill(0, 1, 2), joining=join)
    before = [tensor.clone() for tensor in sequences.runner._kv.tensors]
    rows = sequences.decode(0, 1, 2)  # three rows in a graph of four
    sequences.run(rows)
    written = {sequences.runner._table.block_ids[row.request_id][0] * BLOCK_SIZE + row.start for row in rows}
    for old, new in zip(before, sequences.runner._kv.tensors, strict=True):
        changed = ~((old == new) | (old.isnan() & new.isnan())).flatten(1).all(dim=1)
        assert set(changed.nonzero().flatten().tolist()) == written


def test_nothing_is_compiled_while_serving(served, sequences):
    """Every launch while serving, in all tests above too, is one that the warm-up or a capture has made before."""
    runner, compiled, keys = served
    for i, length in enumerate((1, 16, 31, 2, 50)):
        join = sequences.joining(i, [5 + i] * length, **SAMPLING[i % 3])
        batch = sequences.batch([*sequences.decode(*range(i)), *sequences.prefill(i)], joining=[join])
        for row, token in zip(batch.rows, runner.run(batch).sampled, strict=True):
            sequences.tokens[row.request_id].append(token)
    for count in (1, 3, 5):
        runner.run(sequences.batch(sequences.decode(*range(count))))
    assert {key[0] for key in compiled} >= {
        "attention_kernel",
        "attention_reduce_kernel",
        "norm_kernel",
        "choose_kernel",
    }
    assert not keys - compiled, "\n".join(map(str, sorted(keys - compiled)))


def test_nothing_is_compiled_while_serving_with_compressed_weights(decoder):
    """Products have tiles for 16, 32 and 64 tokens, and prompts of any length meet all of them."""
    compressed = copy.deepcopy(decoder)
    for module in compressed.modules():
        if isinstance(module, Linear):
            module.compress(module.weight.data, "fp8_weight")
    with recorded_launches() as keys:
        runner = make_runner(compressed, max_bs=1)
        compiled = set(keys)
        for i, length in enumerate((16, 20, 50)):
            join = JoiningSequence(
                request_id=i, prompt_ids=[5] * length, block_ids=[0, 1, 2, 3], stop_token_ids=[],
                sampling=SamplerSettings(),
            )  # fmt: skip
            row = Row(i, 0, length)
            batch = IterationBatch(
                iteration_id=i, rows=[row], token_ids=join.prompt_ids, joining=[join], dropped=[i - 1]
            )
            assert runner.run(batch).sampled[0] >= 0
    assert "linear_kernel" in {key[0] for key in compiled}
    assert not keys - compiled


def test_a_long_prompt_runs_in_passes_that_fit(decoder):
    rows = [Row(7, 3, 1), Row(8, 0, 9, False), Row(9, 0, 2)]
    parts = list(passes(rows, 5))
    assert parts == [
        [(0, Row(7, 3, 1)), (1, Row(8, 0, 4, False))],
        [(1, Row(8, 4, 5, False))],
        [(2, Row(9, 0, 2))],
    ]
    sequences = Sequences(make_runner(decoder, max_bs=2, max_tokens=8), decoder)
    prompts = [list(range(20, 39)), [5, 6, 7]]
    join = [sequences.joining(i, prompt) for i, prompt in enumerate(prompts)]
    sequences.run(sequences.prefill(0, 1), joining=join)
    sequences.run(sequences.decode(1, 0))


def test_buckets():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(4) == [1, 2, 4]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(288)[-5:] == [240, 248, 256, 272, 288]


def test_the_pool_takes_what_a_profile_leaves(decoder):
    options = {"bytes_per_token": 10, "block_size": 16, "longest": 100}
    assert count_slots(10_000, 1000, 500, **options, wanted=None) == 736
    assert count_slots(10_000, 1000, 500, **options, wanted=640) == 640
    with pytest.raises(OutOfDeviceMemoryError, match=r"lower kv_cache.n_slots .* scheduler.max_bs"):
        count_slots(10_000, 1000, 500, **options, wanted=800)
    with pytest.raises(OutOfDeviceMemoryError, match=r"a sequence of 100 tokens .* lower limits.max_model_len"):
        count_slots(3000, 1000, 500, **options, wanted=None)
    shape = {"block_size": BLOCK_SIZE, "max_tokens": 100, "max_bs": 3}  # more than the model has positions
    assert measure_iteration(HostDevice(), decoder, torch.float32, **shape) == 0
