"""The decoder against transformers in float32: logits, greedy continuations in mixed iterations, memory."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.models.decoder import Decoder
from orca_backend.models.spec import ModelSpec, UnsupportedModelError
from orca_backend.models.weights import load_decoder
from orca_kernels import AttentionMetadata

BLOCK = 16
BLOCKS = 64
TEXT = """<|im_start|>user
What is iteration-level scheduling, and why do servers of language models use it?<|im_end|>
<|im_start|>assistant
A server runs one iteration of the model at a time. Requests that have finished leave the batch at once, and requests
that have arrived join it, so that nobody waits for the longest answer. 日本語 and 😀 cost 3 or 4 bytes each: 1,024 + 7.
def select(pool, n_rsrv):
    batch = []
"""


@dataclass
class Pair:
    """Our decoder and transformers' model of the same checkpoint, both in float32."""

    checkpoint: Path
    decoder: Decoder
    spec: ModelSpec
    oracle: Any

    def kv(self) -> AttentionKV:
        """A pool whose every slot is NaN until it is written."""
        kv = AttentionKV(self.spec, BLOCKS * BLOCK, torch.float32)
        for tensor in kv.tensors:
            tensor.fill_(float("nan"))
        return kv

    def prompt(self, seed: int, length: int) -> list[int]:
        """`length` tokens of real text, from another place in it for every seed."""
        ids = Tokenizer.from_file(str(self.checkpoint / "tokenizer.json")).encode(TEXT).ids
        return (ids[11 * seed :] + ids)[:length]

    def run(self, kv: AttentionKV, rows: list[tuple[list[int], int, list[int]]], every: bool = False) -> torch.Tensor:
        """Logits of the last token of each (token ids, start, blocks) row, or of every token."""
        lengths = [len(tokens) for tokens, _, _ in rows]
        metadata = AttentionMetadata.build(lengths, [row[1] for row in rows], [row[2] for row in rows], BLOCK)
        flat = torch.tensor([token for tokens, _, _ in rows for token in tokens])
        wanted = torch.arange(len(flat)) if every else metadata.query_start_loc[1:].long() - 1
        return self.decoder(flat, metadata, kv, wanted)


@pytest.fixture(scope="module", params=["smollm2", "tiny_llama", "tiny_gpt2"])
def pair(request: pytest.FixtureRequest) -> Pair:
    from transformers import AutoModelForCausalLM

    checkpoint = request.getfixturevalue(request.param)
    decoder, spec = load_decoder(checkpoint, torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    return Pair(checkpoint, decoder, spec, oracle)


def blocks_of(number: int) -> list[int]:
    """Eight blocks of the pool, scattered, for sequence `number` (up to eight)."""
    blocks = list(range(BLOCKS))
    random.Random(3).shuffle(blocks)
    return blocks[8 * number : 8 * number + 8]


def test_prefill_logits(pair: Pair) -> None:
    prompt = pair.prompt(0, 100)
    with torch.inference_mode():
        expected = pair.oracle(torch.tensor([prompt])).logits[0]
    actual = pair.run(pair.kv(), [(prompt, 0, blocks_of(0))], every=True)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4 * expected.abs().max().item())


def test_greedy_continuations_in_mixed_iterations(pair: Pair) -> None:
    """Five sequences join at different iterations, one of them in chunks: each is what transformers generates alone."""
    prompts = [pair.prompt(seed, length) for seed, length in enumerate((5, 33, 16, 1, 70))]
    joins, chunk, new_tokens = (0, 0, 3, 4, 6), 32, 12
    kv, outputs, done = pair.kv(), [[] for _ in prompts], [0] * len(prompts)
    iteration = mixed = 0
    while any(len(output) < new_tokens for output in outputs):
        rows, members = [], []
        for number, prompt in enumerate(prompts):
            if joins[number] > iteration or len(outputs[number]) == new_tokens:
                continue
            tokens = (prompt + outputs[number])[done[number] : done[number] + chunk]
            rows.append((tokens, done[number], blocks_of(number)))
            members.append(number)
        best = pair.run(kv, rows).argmax(dim=-1).tolist() if rows else []
        for number, (tokens, _, _), token in zip(members, rows, best, strict=True):
            done[number] += len(tokens)
            if done[number] >= len(prompts[number]):
                outputs[number].append(token)
        mixed += len({len(tokens) == 1 for tokens, _, _ in rows}) == 2
        iteration += 1
    assert mixed >= 3
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = pair.oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=pair.spec.vocab_size + 1,
            pad_token_id=0,
        )
        assert output == expected[0, len(prompt) :].tolist()


def test_a_mixed_batch_equals_its_rows_alone(pair: Pair) -> None:
    prompts = [pair.prompt(seed, 60) for seed in range(4)]
    rows = [(prompts[0][40:41], 40), (prompts[1], 0), (prompts[2][20:45], 20), (prompts[3][:1], 0)]

    def logits(members: list[int]) -> torch.Tensor:
        kv = pair.kv()
        for number in members:
            if rows[number][1]:
                pair.run(kv, [(prompts[number][: rows[number][1]], 0, blocks_of(number))])
        return pair.run(kv, [(*rows[number], blocks_of(number)) for number in members])

    together = logits([0, 1, 2, 3])
    for number in range(4):
        alone = logits([number])[0]
        torch.testing.assert_close(together[number], alone, rtol=1e-4, atol=1e-4 * alone.abs().max().item())


def test_only_wanted_rows_reach_the_head(pair: Pair) -> None:
    prompt = pair.prompt(9, 12)
    every = pair.run(pair.kv(), [(prompt, 0, blocks_of(0))], every=True)
    metadata = AttentionMetadata.build([12], [0], [blocks_of(0)], BLOCK)
    some = pair.decoder(torch.tensor(prompt), metadata, pair.kv(), torch.tensor([11, 3]))
    assert some.shape == (2, pair.spec.vocab_size)
    torch.testing.assert_close(some, every[[11, 3]], rtol=1e-4, atol=1e-4 * every.abs().max().item())


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(pair: Pair) -> None:
    from transformers import AutoModelForCausalLM

    decoder, spec = load_decoder(pair.checkpoint, torch.bfloat16)
    other = AutoModelForCausalLM.from_pretrained(pair.checkpoint, dtype=torch.bfloat16, attn_implementation="eager")
    prompt = pair.prompt(1, 64)
    metadata = AttentionMetadata.build([64], [0], [blocks_of(0)], BLOCK)
    actual = decoder(torch.tensor(prompt), metadata, AttentionKV(spec, 1024, torch.bfloat16), torch.arange(64))
    exact = pair.run(pair.kv(), [(prompt, 0, blocks_of(0))], every=True)
    with torch.inference_mode():
        theirs = other(torch.tensor([prompt])).logits[0].float()
    assert actual.dtype == torch.float32
    assert 0 < (actual - exact).norm() < 1.3 * (theirs - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_kv_sizes(pair: Pair, dtype: torch.dtype) -> None:
    kv = AttentionKV(pair.spec, 48, dtype, head_dim_multiple=16)
    per_token = AttentionKV.bytes_per_token(pair.spec, dtype, head_dim_multiple=16)
    assert kv.num_bytes == 48 * per_token
    assert not any(tensor.any() for tensor in kv.tensors)


def test_loading_holds_one_copy_of_the_weights(smollm2: Path) -> None:
    # VmHWM and not ru_maxrss: that one begins with the peak of the process that started this one.
    code = """
import re, sys
from pathlib import Path
import torch
from orca_backend.models.weights import load_decoder
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
decoder, _ = load_decoder(sys.argv[1], torch.bfloat16)
print((peak() - before) / decoder.num_bytes, decoder.num_bytes)
"""
    run = subprocess.run([sys.executable, "-c", code, str(smollm2)], capture_output=True, text=True, check=True)
    ratio, num_bytes = (float(word) for word in run.stdout.split())
    assert num_bytes == pytest.approx((smollm2 / "model.safetensors").stat().st_size, rel=1e-3)
    assert 0.9 < ratio < 1.3


def test_weights_that_contradict_the_config_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    config = (tiny_llama / "config.json").read_text()
    (tmp_path / "model.safetensors").symlink_to(tiny_llama / "model.safetensors")
    for old, new, message in (
        ('"num_hidden_layers": 3', '"num_hidden_layers": 4', r"no tensor 'model\.layers\.3"),
        ('"intermediate_size": 112', '"intermediate_size": 96', "up_proj"),
        ('"num_key_value_heads": 2', '"num_key_value_heads": 4', "k_proj"),
    ):
        assert old in config
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(UnsupportedModelError, match=message):
            load_decoder(tmp_path, torch.float32)
