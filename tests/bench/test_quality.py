"""What precision costs: the measures against transformers and by hand, and the document against its data."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from bench.model import open_model
from bench.numerics import render
from bench.quality import (
    BFLOAT16,
    SPECIFICATION,
    TEXTS,
    Likelihoods,
    agreement,
    chunks,
    likelihood_table,
    variants,
)
from orca_backend.config import EngineConfig, KVCacheConfig

ROOT = Path(__file__).resolve().parents[2]


def test_log_probabilities_are_those_of_transformers(tiny_llama: Path, tiny_llama_source: Path) -> None:
    from transformers import LlamaForCausalLM

    ids = [int(i) for i in torch.randint(3, 259, (100,), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(tiny_llama_source)(torch.tensor([ids]), labels=torch.tensor([ids]))
    model = open_model(model=str(tiny_llama), dtype="float32", kernels="torch", kv_cache={"n_slots": 112})
    log_probs = model.logits(ids).log_softmax(1)
    torch.testing.assert_close(log_probs, theirs.logits[0].log_softmax(1), atol=1e-4, rtol=1e-4)
    measured = Likelihoods.of(log_probs, log_probs, ids)
    table = likelihood_table({"text": [measured]})
    assert table["perplexity"] == pytest.approx(math.exp(theirs.loss.item()), rel=1e-4)
    assert table["log-probability error"]["max"] == 0
    assert table["same most likely token"] == 1
    pieces = list(chunks(ids, 40))
    assert [len(piece) for piece in pieces] == [40, 40, 20]
    assert list(itertools.chain(*pieces)) == ids


def test_likelihoods_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]).log()
    ours = torch.tensor([[0.25, 0.75], [0.6, 0.4], [0.5, 0.5]]).log()
    found = Likelihoods.of(ours, reference, [0, 0, 1])
    # After token 0 comes 0, then 1; what follows the last token is not known.
    torch.testing.assert_close(found.loss, -torch.tensor([0.25, 0.4]).log())
    torch.testing.assert_close(found.error, torch.tensor([math.log(2), math.log(4)]))
    divergence = [0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), 0.9 * math.log(1.5) + 0.1 * math.log(0.25)]
    torch.testing.assert_close(found.divergence, torch.tensor(divergence))
    assert found.same_best.tolist() == [False, True]


def test_agreement_by_hand() -> None:
    reference = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    answers = [[1, 2, 0, 4], [5, 6, 7, 8], [0, 9, 9, 9]]
    assert agreement(answers, reference) == {
        "equal tokens": pytest.approx(10 / 12),
        "equal answers": 1,
        "until first difference": 2,
    }


def test_every_quantization_is_measured_and_every_text_is_there() -> None:
    # The compiled kernels, which are measured, do not have fp8.
    known = set(get_args(get_type_hints(EngineConfig)["quantization"])) - {"fp8_weight"}
    assert {settings.get("quantization", "none") for settings in variants("m", 1).values()} == known
    pools = set(get_args(get_type_hints(KVCacheConfig)["dtype"])) - {"fp8"}
    assert {settings.get("kv_cache", {}).get("dtype", "auto") for settings in variants("m", 1).values()} == pools
    assert all(len(text.read()) > 2000 for text in TEXTS)


def test_the_document_says_what_was_measured() -> None:
    result = json.loads((ROOT / "bench" / "results" / "quality.json").read_text())
    assert (ROOT / "docs" / "numerics.md").read_text() == render(result)
    assert sum(text["tokens"] for text in result["texts"]) >= 8000
    perplexity = {name: numbers["perplexity"] for name, numbers in result["variants"].items()}
    assert perplexity["fp32, compiled"] == pytest.approx(perplexity[SPECIFICATION], rel=1e-5)
    assert perplexity["int8"] == pytest.approx(perplexity[BFLOAT16], rel=0.01)
    assert set(perplexity) == set(variants("m", 1))


@pytest.mark.slow
def test_the_command_measures_every_variant_on_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    results, document = tmp_path / "quality.json", tmp_path / "numerics.md"
    command = [sys.executable, "-m", "bench.quality", "--model", str(smollm2), "--threads", "1", "--tokens", "80"]
    command += ["--chunk", "80", "--prompts", "1", "--prompt", "16", "--output-tokens", "8"]
    done = subprocess.run(
        [*command, "--results", str(results), "--document", str(document)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert results.exists(), done.stderr
    result = json.loads(results.read_text())
    assert list(result["variants"]) == list(variants("m", 1))
    exact = result["variants"]["fp32, compiled"]
    assert exact["agreement with the specification"]["equal answers"] == len(TEXTS)
    assert exact["log-probability error"]["max"] < 1e-3
    rounded = result["variants"]["int8"]
    assert rounded["log-probability error"]["mean"] > exact["log-probability error"]["mean"]
    assert document.read_text() == render(result)
