"""Norms and activations in the Triton language, under its interpreter, against the plain-torch functions.

The interpreter rounds float32 to bfloat16 by cutting bits off, hence float16 here for 16-bit rounding.
"""

from __future__ import annotations

import pytest
import torch

from orca_kernels import add_layer_norm, add_rms_norm, dispatch, gelu, layer_norm, rms_norm, swiglu


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def both(operator, *tensors: torch.Tensor, **options):
    """What plain torch and the Triton language make of copies of `tensors`: results, and the tensors afterwards."""
    outcomes = []
    for backend in ("torch", "triton"):
        copies = [tensor.clone() for tensor in tensors]
        dispatch.configure(backend)
        try:
            outcomes.append((operator(*copies, **options), copies))
        finally:
            dispatch.configure()
    return outcomes


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within rounding: 1e-5 relative in float32, and a ratio of root mean squares of 2e-3 in 16 bits."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if expected.dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("n", [1, 63, 960, 5120])
@pytest.mark.parametrize("gemma", [False, True])
def test_rms_norms(n: int, gemma: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    x, residual, weight = torch.randn(3, n).to(dtype), (5 * torch.randn(3, n)).to(dtype), torch.randn(n).to(dtype)
    (expected, _), (actual, _) = both(lambda x, w: rms_norm(x, w, 1e-5, gemma=gemma), x, weight)
    assert_near(actual, expected)
    (expected, (_, sums, _)), (actual, (_, fused_sums, _)) = both(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5, gemma=gemma), x, residual, weight
    )
    assert_near(actual, expected)
    assert torch.equal(fused_sums, sums)  # the residual stream itself is the same to the bit


@pytest.mark.parametrize("n", [2, 60, 1000])
def test_layer_norms(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    x, residual = (torch.randn(4, n) + 3).to(dtype), torch.randn(4, n).to(dtype)
    weight, bias = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    (expected, _), (actual, _) = both(lambda x, w, b: layer_norm(x, w, b, 1e-5), x, weight, bias)
    assert_near(actual, expected)
    (expected, (_, sums, _, _)), (actual, (_, fused_sums, _, _)) = both(
        lambda x, r, w, b: add_layer_norm(x, r, w, b, 1e-5), x, residual, weight, bias
    )
    assert_near(actual, expected)
    assert torch.equal(fused_sums, sums)


def test_a_norm_of_columns_that_are_not_adjacent(dtype: torch.dtype) -> None:
    x = torch.randn(6, 64).to(dtype)
    (expected, _), (actual, _) = both(lambda x, w: rms_norm(x[:, ::2], w, 1e-5), x, torch.randn(32).to(dtype))
    assert_near(actual, expected)


def test_a_row_that_no_program_holds_is_refused() -> None:
    dispatch.configure("triton")
    try:
        with pytest.raises(ValueError, match="longer than one program"):
            rms_norm(torch.zeros(1, 40_000), torch.zeros(40_000), 1e-5)
    finally:
        dispatch.configure()


@pytest.mark.parametrize("width", [3, 100, 2050])
@pytest.mark.filterwarnings("ignore:overflow")
def test_activations(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (4 * torch.randn(3, 2 * width)).to(dtype)
    x[0, 0], x[1, 0] = 60000.0, -60000.0  # far where an exponential overflows
    for operator in (swiglu, lambda x: gelu(x, "none"), lambda x: gelu(x, "tanh")):
        # In 16 bits plain torch rounds silu(gate) before the product; the kernel does not: compare with float32.
        (expected, _), _ = both(operator, x.float())
        _, (actual, _) = both(operator, x)
        assert_near(actual[:, 1:], expected.to(dtype)[:, 1:])
        assert torch.allclose(actual[:, 0].float(), expected.to(dtype)[:, 0].float(), rtol=2e-3, equal_nan=True)
