"""The systems that are compared: the environment, the adapter, the options and the form of the checkpoint of each."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.environments import ROOT, RUN, Environment, run
from bench.peers.gguf_file import write_gguf
from bench.peers.workload import KINDS
from orca_backend.models.import_model import smollm2_gguf

ADAPTERS = Path(__file__).with_name("adapters")

OPENVINO = Environment("openvino")
VLLM = Environment("vllm")
TRANSFORMERS = Environment("transformers")
# Built from source for this processor; without what the benchmark does not run and what it would download.
LLAMACPP = Environment(
    "llamacpp",
    {
        "CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
        "-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
        "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count()),
    },
)


def as_it_is(checkpoint: Path) -> Path:
    """The imported checkpoint itself."""
    return checkpoint


def _fresh(made: Path, checkpoint: Path) -> bool:
    return made.exists() and made.stat().st_mtime >= (checkpoint / "model.safetensors").stat().st_mtime


def openvino_ir(weight_format: str) -> Callable[[Path], Path]:
    """The checkpoint as OpenVINO's intermediate representation, weights in "fp16" or "int8"."""

    def export(checkpoint: Path) -> Path:
        target = RUN / "models" / f"{checkpoint.name}-openvino-{weight_format}"
        if not _fresh(target / "openvino_model.bin", checkpoint):
            command = [str(OPENVINO.python.with_name("optimum-cli")), "export", "openvino", "--model", str(checkpoint)]
            command += ["--task", "text-generation-with-past", "--weight-format", weight_format, str(target)]
            run(command, target.name, {"HF_HUB_OFFLINE": "1"})
        return target

    return export


def gguf_file(kind: str) -> Callable[[Path], Path]:
    """The checkpoint, which is SmolLM2, as GGUF with matrices in "bf16" or "q8_0"."""

    def export(checkpoint: Path) -> Path:
        target = RUN / "models" / f"{checkpoint.name}-{kind}.gguf"
        if not _fresh(target, checkpoint):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            write_gguf(checkpoint, smollm2_gguf(), kind, partial)
            partial.replace(target)
        return target

    return export


def _vllm_variables() -> dict[str, str]:
    """What its documentation recommends: Intel's OpenMP, and tcmalloc where the system has it."""
    libraries = [str(VLLM.python.parents[1] / "lib" / "libiomp5.so"), ctypes.util.find_library("tcmalloc_minimal")]
    return {
        "LD_PRELOAD": ":".join(filter(None, libraries)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(RUN / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }


@dataclass(frozen=True)
class SystemUnderTest:
    """`environment` None is the product's own. `options` go to the adapter, see adapters/protocol.py.

    `kinds` are those of the tasks that it can do.
    """

    adapter: str
    environment: Environment | None = None
    options: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = KINDS
    prepare: Callable[[Path], Path] = as_it_is
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter of the adapter."""
        return str(self.environment.python) if self.environment else sys.executable


_OURS = {"PYTHONPATH": str(ROOT)}
_AT_ONCE = tuple(kind for kind in KINDS if kind != "online")
# Chunked prefill: nobody's next token waits for a long prompt.
_SARATHI = {"scheduler": {"policy": "sarathi", "token_budget": 224}}

SYSTEMS: dict[str, SystemUnderTest] = {
    "ours": SystemUnderTest("serve_ours.py", variables=_OURS),
    "ours-int8": SystemUnderTest("serve_ours.py", options={"weights": "int8"}, variables=_OURS),
    "ours-served": SystemUnderTest("serve_triton.py", options={"engine": _SARATHI}, kinds=("online",), variables=_OURS),
    "ours-served-orca": SystemUnderTest("serve_triton.py", kinds=("online",), variables=_OURS),
    "openvino": SystemUnderTest("serve_openvino.py", OPENVINO, prepare=openvino_ir("fp16")),
    "openvino-int8": SystemUnderTest(
        "serve_openvino.py", OPENVINO, options={"weights": "int8"}, prepare=openvino_ir("int8")
    ),
    "llamacpp": SystemUnderTest("serve_llamacpp.py", LLAMACPP, kinds=_AT_ONCE, prepare=gguf_file("bf16")),
    "llamacpp-q8": SystemUnderTest(
        "serve_llamacpp.py", LLAMACPP, options={"weights": "int8"}, kinds=_AT_ONCE, prepare=gguf_file("q8_0")
    ),
    "transformers": SystemUnderTest("serve_transformers.py", TRANSFORMERS, kinds=_AT_ONCE),
    "vllm": SystemUnderTest("serve_vllm.py", VLLM, variables=_vllm_variables()),
}
