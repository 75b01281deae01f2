"""The operators beside attention, each against its formula or against transformers' own module."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path

import pytest
import torch

import orca_kernels
from orca_kernels import apply_rope, gelu, kv_write, layer_norm, linear, rms_norm, rope_cos_sin, swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_bitwise_the_one_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    module = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    module.weight.data += torch.randn(96).to(dtype)
    x = (3 * torch.randn(11, 96)).to(dtype)
    assert torch.equal(rms_norm(x, module.weight, 1e-5), module(x))


def test_layer_norm_and_linear_follow_their_formulas() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 12).double(), torch.randn(12).double(), torch.randn(12).double()
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-3).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-3), expected)
    matrix = torch.randn(7, 12).double()
    torch.testing.assert_close(linear(x, matrix), x @ matrix.t())
    torch.testing.assert_close(linear(x, matrix, bias[:7]), x @ matrix.t() + bias[:7])


def test_activations_follow_their_formulas() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8).double()
    gate, up = x[:, :4], x[:, 4:]
    torch.testing.assert_close(swiglu(x), gate / (1 + (-gate).exp()) * up)
    torch.testing.assert_close(gelu(x, "none"), x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu(x, "tanh"), 0.5 * x * (1 + inner.tanh()))


def test_rope_turns_pairs_of_the_two_halves() -> None:
    torch.manual_seed(0)
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    positions = torch.tensor([0, 5, 1000])
    x = torch.randn(3, 2, 6)
    actual = apply_rope(x, *rope_cos_sin(positions, inv_freq))
    numbers = torch.complex(x[..., :3], x[..., 3:]).to(torch.complex128)
    turned = numbers * torch.exp(1j * positions[:, None, None].double() * inv_freq.double())
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(actual[0], x[0])


def test_kv_write_touches_only_its_slots() -> None:
    k_cache, v_cache = torch.zeros(10, 2, 4), torch.zeros(10, 2, 4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    slots = torch.tensor([7, 0, 4])
    kv_write(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots], k)
    assert torch.equal(v_cache[slots], v)
    others = [i for i in range(10) if i not in (7, 0, 4)]
    assert not k_cache[others].any()
    assert not v_cache[others].any()
    with pytest.raises(IndexError):
        kv_write(k, v, k_cache, v_cache, torch.tensor([1, 2, 10]))


def test_the_folder_name_shadows_no_package() -> None:
    """transformers imports a package `kernels` when there is one, and fails on ours: the folder must stay nameless."""
    from transformers.utils import is_kernels_available

    folder = Path(orca_kernels.__file__).parent
    assert folder.name == "orca_kernels"
    assert not (folder.parent / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None
    assert not is_kernels_available()


def test_operators_know_no_models() -> None:
    for file in Path(orca_kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("orca_backend", "transformers")) for name in names), file.name
