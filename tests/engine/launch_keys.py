"""What would have to be compiled: launches under the interpreter, told apart as Triton's compiler does."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from triton.runtime.interpreter import InterpretedFunction


def _kind(value: object) -> object:
    """Of a run-time argument: type, and what the compiler makes special cases of."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "int", value == 1, value % 16 == 0
    return value if value is None else type(value).__name__


@contextlib.contextmanager
def recorded_launches() -> Iterator[set[tuple[object, ...]]]:
    """The set of keys, as it grows."""
    keys: set[tuple[object, ...]] = set()
    run = InterpretedFunction.run

    def record(self: InterpretedFunction, *args: object, **options: object) -> object:
        signature = inspect.signature(self.fn)
        named = {name: value for name, value in options.items() if name in signature.parameters}
        key: list[object] = [self.fn.__name__, options.get("num_warps"), options.get("num_stages")]
        for name, value in signature.bind(*args, **named).arguments.items():
            if "constexpr" in str(signature.parameters[name].annotation):
                key.append(value)
            elif name in (self.kwargs["do_not_specialize"] or ()):
                key.append(type(value).__name__)
            else:
                key.append(_kind(value))
        keys.add(tuple(map(str, key)))
        return run(self, *args, **options)

    InterpretedFunction.run = record
    try:
        yield keys
    finally:
        InterpretedFunction.run = run
