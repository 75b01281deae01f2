"""Load a checkpoint into a decoder: built on the meta device, then filled tensor by tensor, one copy of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from orca_backend.models.decoder import Decoder
from orca_backend.models.layers import Linear
from orca_backend.models.spec import ModelSpec, UnsupportedModelError
from orca_kernels.linear import WeightKind

WEIGHTS_FILE = "model.safetensors"

_CHUNK_BYTES = 16 << 20  # read at a time: bounds what is held besides the weights


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from: checkpoint tensors stacked along dimension 0; GPT-2's Conv1D are [in, out]."""

    names: tuple[str, ...]
    transposed: bool = False


def checkpoint_layout(spec: ModelSpec) -> dict[str, Source]:
    """Parameter name of the Decoder to its source in a checkpoint of the spec's architecture."""
    layouts = {"LlamaForCausalLM": _llama_layout, "GPT2LMHeadModel": _gpt2_layout}
    return layouts[spec.architecture](spec)


def _llama_layout(spec: ModelSpec) -> dict[str, Source]:
    layout = {"embedding": Source(("model.embed_tokens.weight",)), "norm.weight": Source(("model.norm.weight",))}
    if not spec.tie_embeddings:
        layout["head"] = Source(("lm_head.weight",))
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        layout[f"{ours}.attention_norm.weight"] = Source((f"{theirs}.input_layernorm.weight",))
        layout[f"{ours}.mlp_norm.weight"] = Source((f"{theirs}.post_attention_layernorm.weight",))
        for part, bias, names in (
            ("attention.qkv", spec.qkv_bias, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("attention.out", spec.out_bias, ("self_attn.o_proj",)),
            ("mlp.up", spec.mlp_bias, ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.down", spec.mlp_bias, ("mlp.down_proj",)),
        ):
            for kind in ("weight", "bias") if bias else ("weight",):
                layout[f"{ours}.{part}.{kind}"] = Source(tuple(f"{theirs}.{name}.{kind}" for name in names))
    return layout


def _gpt2_layout(spec: ModelSpec) -> dict[str, Source]:
    layout = {
        "embedding": Source(("transformer.wte.weight",)),
        "position_embedding": Source(("transformer.wpe.weight",)),
        "norm.weight": Source(("transformer.ln_f.weight",)),
        "norm.bias": Source(("transformer.ln_f.bias",)),
    }
    if not spec.tie_embeddings:
        layout["head"] = Source(("lm_head.weight",))
    parts = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(spec.num_layers):
        for part, name in parts.items():
            theirs = f"transformer.h.{i}.{name}"
            layout[f"layers.{i}.{part}.weight"] = Source((f"{theirs}.weight",), transposed="norm" not in part)
            layout[f"layers.{i}.{part}.bias"] = Source((f"{theirs}.bias",))
    return layout


def load_decoder(
    checkpoint_dir: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    weight_kind: WeightKind | None = None,
) -> tuple[Decoder, ModelSpec]:
    """The decoder of a checkpoint made by `import_model`, its weights in `dtype` on `device`, and its spec.

    With a `weight_kind` the weights of the layers' projections are compressed, one after the other as they come;
    embedding and head stay as they are.

    Raises FileNotFoundError without a checkpoint, UnsupportedModelError for an unknown kind or a tensor that is missing
    or of another shape than config.json says.
    """
    directory = Path(checkpoint_dir)
    spec = ModelSpec.read(directory)
    with torch.device("meta"):
        decoder = Decoder(spec)
    decoder.to(dtype)
    decoder.place(device)
    layout = checkpoint_layout(spec)
    file = directory / WEIGHTS_FILE
    for name, parameter in list(decoder.named_parameters()):
        tensor = torch.empty_like(parameter, device=device)
        _fill(tensor, file, layout[name])
        owner, _, attribute = name.rpartition(".")
        module = decoder.get_submodule(owner)
        if weight_kind is not None and isinstance(module, Linear) and attribute == "weight":
            module.compress(tensor, weight_kind)
        else:
            setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=False))
    return decoder, spec


def _fill(parameter: torch.Tensor, file: Path, source: Source) -> None:
    """Copy the tensors of `source` into consecutive rows of `parameter`.

    The file is opened anew for every piece: closing gives back the mapped pages, which count as memory of the process.
    """
    row = 0
    for name in source.names:
        with safe_open(file, framework="pt") as opened:
            if name not in opened.keys():  # noqa: SIM118 - not a mapping
                raise UnsupportedModelError(f"{file} has no tensor {name!r}")
            shape = opened.get_slice(name).get_shape()
        inputs = list(parameter.shape[1:])
        rows, columns = (shape[-1], shape[:-1]) if source.transposed else (shape[0], shape[1:])
        if columns != inputs or row + rows > len(parameter):
            raise UnsupportedModelError(
                f"tensor {name!r} of {file} has shape {shape}, which config.json does not allow"
            )
        step = max(1, _CHUNK_BYTES // max(1, 4 * parameter[0].numel()))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            with safe_open(file, framework="pt") as opened:
                tensor = opened.get_slice(name)
                piece = tensor[:, first:last].t() if source.transposed else tensor[first:last]
                parameter[row + first : row + last].copy_(piece)
        row += rows
    if row != len(parameter):
        raise UnsupportedModelError(
            f"tensors {source.names} of {file} have {row} rows, config.json says {len(parameter)}"
        )
