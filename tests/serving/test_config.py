"""engine.yaml: what cannot be served is refused when it is read, with the file and the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_backend.config import ConfigError, load_config


def load(directory: Path, settings: str) -> None:
    path = directory / "engine.yaml"
    path.write_text(f"model: m\n{settings}\n")
    load_config(path)


@pytest.mark.parametrize("value", [".inf", ".nan", "0", "-1", "1.0e+10"])
@pytest.mark.parametrize("name", ["request_timeout", "engine_silence"])
def test_infinite_and_other_times_that_are_none(tmp_path: Path, name: str, value: str) -> None:
    """`.inf` was once accepted, and became null on the way to the engine process."""
    with pytest.raises(ConfigError, match=rf"engine\.yaml: .*{name}"):
        load(tmp_path, f"limits: {{{name}: {value}}}")
    load(tmp_path, f"limits: {{{name}: 1.0e+9}}")


@pytest.mark.parametrize(
    ("default", "field"),
    [
        ("n: 2", "n = 2"),
        ("logprobs: 0", "logprobs = 0"),
        ("prompt_logprobs: 1", "prompt_logprobs"),
        ("bad_words: [x]", "bad_words"),
        ("logit_bias: {'5': 1.0}", "logit_bias"),
        (f"stop: [{'x' * 1025}]", "stop: .* 1024 characters"),
        ("min_tokens: 32", "min_tokens: 32 is above max_tokens: 16"),
    ],
)
def test_sampling_defaults_that_no_request_could_use(tmp_path: Path, default: str, field: str) -> None:
    """They once loaded, and made every request UNSUPPORTED."""
    with pytest.raises(ConfigError, match=rf"engine\.yaml: .*{field}"):
        load(tmp_path, f"sampling_defaults: {{{default}}}")


@pytest.mark.parametrize("device", ["gpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "mps", ""])
def test_devices_that_are_none(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.yaml: device must be auto, cpu, cuda or cuda:N"):
        load(tmp_path, f"device: '{device}'")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_that_are(tmp_path: Path, device: str) -> None:
    load(tmp_path, f"device: {device}")
