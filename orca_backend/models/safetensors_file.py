"""Write a safetensors file piece by piece.

The library can only save tensors that are all in memory; an import must not hold more than a piece of one.
Format: 8 bytes of header length, a JSON header, then the data (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    read: Callable[[str], Iterable[torch.Tensor]],
) -> None:
    """Write the tensors of `shapes` to `path` in `dtype`, in that order, with a progress bar on a terminal.

    `read(name)` yields the tensor as consecutive pieces of dimension 0, of any float type. Raises ValueError if they
    do not add up to the shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (
        path.open("wb") as file,
        tqdm(total=end, unit="B", unit_scale=True, desc="weights", disable=None) as progress,
    ):
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            written = 0
            for piece in read(name):
                data = piece.to(dtype).contiguous().view(torch.uint8).numpy()
                file.write(data.data)
                written += data.nbytes
                progress.update(data.nbytes)
            if written != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name!r} gave {written} bytes, not those of shape {list(shape)} in {dtype}")
