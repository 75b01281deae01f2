"""How much there is to do: operations and bytes of tokens, and the least time they can take on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from orca_backend.models.spec import ModelSpec


@dataclass(frozen=True)
class Work:
    """`operations` are multiplications and additions; `bytes_read` those that must come from memory."""

    operations: float = 0.0
    bytes_read: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Both."""
        return Work(self.operations + other.operations, self.bytes_read + other.bytes_read)

    def seconds(self, limits: dict[str, float]) -> dict[str, float]:
        """The least time for the reads alone ("memory") and for the products alone ("matrix")."""
        return {
            "memory": self.bytes_read / (limits["read GB/s"] * 1e9),
            "matrix": self.operations / (limits["tflops"] * 1e12),
        }


def row_work(spec: ModelSpec, start: int, tokens: int, *, sampled: int, kv_bytes_per_token: int) -> Work:
    """A row of `tokens` tokens from position `start` on, the last `sampled` of which need logits.

    Of the reads only the cached K/V before `start`: what the row itself writes is still in the cache.
    """
    activation = 2 if spec.activation == "swiglu" else 1
    layer_weights = (
        spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        + spec.num_heads * spec.head_dim * spec.hidden_size
        + (activation + 1) * spec.hidden_size * spec.intermediate_size
    )
    # Every token attends to itself and to all before it: one product with the keys and one with the values.
    attended = tokens * start + tokens * (tokens + 1) // 2
    products = spec.num_layers * layer_weights * tokens + spec.vocab_size * spec.hidden_size * sampled
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * attended
    return Work(operations=2.0 * (products + attention), bytes_read=float(start * kv_bytes_per_token))
