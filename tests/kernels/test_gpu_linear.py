"""Products with weights of 16, 8 and 4 bits: the rounding, and the kernels against the expanded weight in float32."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from orca_kernels import dispatch, linear
from orca_kernels.gpu import linear as gpu
from orca_kernels.linear import WeightKind, dequantize_weight, quantize_weight

KINDS = get_args(WeightKind)


def ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the error over that of what is expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def triton_backend():
    dispatch.configure("triton")
    yield
    dispatch.configure()


@pytest.mark.parametrize(("kind", "bound"), [("int8_weight", 0.01), ("fp8_weight", 0.035), ("int4_weight", 0.09)])
@pytest.mark.parametrize("inputs", [96, 130, 512])
def test_rounding_loses_what_its_bits_say(kind, bound, inputs):
    torch.manual_seed(inputs)
    weight = torch.randn(40, inputs) * torch.logspace(-3, 3, 40)[:, None]  # outputs of very different sizes
    weight[7] = 0.0
    quantized = quantize_weight(weight, kind)
    expanded = dequantize_weight(quantized, torch.float32)
    error = (expanded - weight).norm(dim=1)
    assert (error <= bound * weight.norm(dim=1) + 1e-20).all()
    assert quantized.num_bytes < weight.nbytes / (2 if inputs < 512 else 3.5)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize(("t", "m", "n"), [(1, 70, 200), (3, 64, 1024), (17, 33, 130), (50, 100, 64)])
def test_the_kernel_is_the_product_with_the_expanded_weight(kind, t, m, n):
    torch.manual_seed(t)
    x, weight, bias = torch.randn(t, n).half(), torch.randn(m, n).half() / n**0.5, torch.randn(m).half()
    operand = weight if kind is None else quantize_weight(weight, kind)
    expanded = weight if kind is None else dequantize_weight(operand, torch.float32)
    expected = x.float() @ expanded.float().t()
    for deterministic in (False, True):
        assert ratio(gpu.linear(x, operand, deterministic=deterministic), expected) < 2e-3
        biased = gpu.linear(x, operand, bias, deterministic=deterministic)
        assert ratio(biased, expected + bias.float()) < 2e-3


def test_split_inputs_are_added_up(monkeypatch):
    """A narrow output leaves a GPU idle: its inputs are split (here into 4 parts, the last of them shorter)."""
    torch.manual_seed(0)
    assert gpu._split(90, 64, 4096 - 100, gpu.linear_constants(90, 1, 1))[0] == 16
    assert gpu._split(90, 64 * 1000, 4096, gpu.linear_constants(90, 1, 1)) == (1, 4096)
    x, weight, bias = torch.randn(2, 128 * 8 - 90), torch.randn(10, 128 * 8 - 90), torch.randn(10)
    operand = quantize_weight(weight, "int4_weight")
    assert gpu._split(80, 10, x.shape[1], gpu.linear_constants(80, 2, 1))[0] == 4
    assert ratio(gpu.linear(x, operand, bias), x @ dequantize_weight(operand, torch.float32).t() + bias) < 1e-5


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_deterministic_row_does_not_depend_on_its_company(kind, triton_backend):
    torch.manual_seed(0)
    x, weight = torch.randn(70, 160), torch.randn(40, 160)
    operand = weight if kind is None else quantize_weight(weight, kind)
    dispatch.configure("triton", deterministic=True)
    alone = torch.cat([linear(row, operand) for row in x.split(1)])
    assert torch.equal(alone, linear(x, operand))
    assert torch.equal(alone[20:30], linear(x[20:30], operand))


@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_go_through_the_expanded_weight(kind, triton_backend):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(80, 64), torch.randn(24, 64), torch.randn(24)
    operand = quantize_weight(weight, kind)
    expected = torch.nn.functional.linear(x, dequantize_weight(operand, torch.float32), bias)
    assert torch.equal(linear(x, operand, bias), expected)
    assert ratio(linear(x[:5], operand, bias), expected[:5]) < 1e-5
