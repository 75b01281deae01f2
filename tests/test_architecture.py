"""Who may import whom. The rooms stay apart because these tests say so."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room: the modules (with all that is in them) that nothing in it may import.
FORBIDDEN = {
    "orca_backend/scheduler": {
        "torch", "numpy", "grpc", "time", "datetime", "threading", "asyncio", "multiprocessing", "socket", "select",
        "orca_kernels", "orca_backend.engine", "orca_backend.models", "orca_backend.serving", "orca_backend.server",
    },
    "orca_backend/serving": {"torch", "transformers", "orca_kernels", "orca_backend.engine", "orca_backend.server"},
    "orca_backend/models": {
        "transformers", "orca_backend.request", "orca_backend.channel", "orca_backend.scheduler",
        "orca_backend.serving", "orca_backend.server",
    },
    "orca_backend/engine": {
        "transformers", "orca_backend.serving", "orca_backend.server", "triton_python_backend_utils",
    },
    "orca_backend/server": {
        "transformers", "orca_backend.engine", "orca_backend.serving", "orca_client", "tritonclient",
    },
    "kernels/orca_kernels": {"transformers", "orca_backend", "orca_client"},
    "client/orca_client": {"torch", "transformers", "orca_backend", "orca_kernels"},
    "model_repository": {"torch", "transformers", "orca_kernels", "orca_client"},
}  # fmt: skip


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, inside functions and under TYPE_CHECKING as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("room", FORBIDDEN)
def test_room_imports_nothing_it_must_not(room: str) -> None:
    files = files_of(room)
    assert files
    found = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if any(within(name, module) for module in FORBIDDEN[room])
    ]
    assert not found


def test_the_stub_loads_no_torch() -> None:
    """Nor does anything that the serving side imports by way of others."""
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files_of("orca_backend/serving")]
    modules = [module.removesuffix(".__init__") for module in modules]
    code = f"""
import importlib, sys, unittest.mock
sys.modules["triton_python_backend_utils"] = unittest.mock.MagicMock()  # exists only inside the stub
for module in {modules}:
    importlib.import_module(module)
print([name for name in ("torch", "transformers", "orca_kernels") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_files_are_small_enough_to_read_in_one_sitting() -> None:
    long = {
        str(file.relative_to(ROOT)): lines
        for room in ("orca_backend", "kernels", "client", "loadtest", "model_repository")
        for file in files_of(room)
        if (lines := len(file.read_text().splitlines())) >= 400
    }
    assert not long


def test_the_folder_kernels_is_no_package() -> None:
    assert (ROOT / "kernels" / "orca_kernels" / "__init__.py").is_file()
    assert not list((ROOT / "kernels").glob("*.py"))
    installed = importlib.metadata.packages_distributions()
    assert "orca_kernels" in installed
    assert "kernels" not in installed  # Hugging Face's: transformers would import it, and may fail on it


@pytest.mark.parametrize("path", [ROOT, ROOT / "kernels"])
def test_transformers_works_with_our_folders_on_the_path(path: Path) -> None:
    code = (
        "import orca_kernels; from transformers.models.llama import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {code}"]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "LlamaForCausalLM", result.stderr
