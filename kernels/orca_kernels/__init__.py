"""Orca-on-Triton's operators, one file each: public function, plain-torch reference, device paths.

Nothing here knows of models or requests. Shapes legend used throughout:
t = tokens of the iteration (all rows, flat), r = rows, h = query heads, k = key/value heads, d = head size,
s = slots of the K/V pool.
"""

from orca_kernels.activation import gelu, swiglu
from orca_kernels.attention import AttentionMetadata, ragged_attention, ragged_attention_reference
from orca_kernels.dispatch import configure
from orca_kernels.kv_write import kv_write, quantize_kv
from orca_kernels.linear import linear
from orca_kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from orca_kernels.qkv import HeadNorm, rope_and_write
from orca_kernels.rope import apply_rope, rope_cos_sin

__all__ = [
    "AttentionMetadata",
    "HeadNorm",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rope",
    "configure",
    "gelu",
    "kv_write",
    "layer_norm",
    "linear",
    "quantize_kv",
    "ragged_attention",
    "ragged_attention_reference",
    "rms_norm",
    "rope_and_write",
    "rope_cos_sin",
    "swiglu",
]
