"""Where operators go, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from orca_kernels import dispatch

CPU = torch.device("cpu")


def test_the_backend_is_the_devices_unless_it_is_chosen() -> None:
    tensor = torch.zeros(1)
    assert not dispatch.use_triton(tensor)
    try:
        dispatch.configure("triton", deterministic=True)
        assert dispatch.use_triton(tensor)
        assert dispatch.deterministic()
        dispatch.configure("torch")
        assert not dispatch.use_triton(tensor)
        assert not dispatch.deterministic()
    finally:
        dispatch.configure()


def test_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.obstacle(torch.float32, CPU) is None  # in the interpreter, which the tests use
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "need a GPU" in str(dispatch.obstacle(torch.bfloat16, CPU))
    card = torch.device("cuda")
    assert "float32" in str(dispatch.obstacle(torch.float32, card))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert dispatch.obstacle(torch.bfloat16, card) is None
    assert "8.9" in str(dispatch.obstacle(torch.bfloat16, card, float8=True))


def test_the_operators_do_not_import_triton() -> None:
    code = "import sys, orca_kernels, orca_kernels.aot; print('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "False", result.stderr
