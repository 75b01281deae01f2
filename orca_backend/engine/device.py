"""What the GPU runner asks of a device, in one place: graphs, copies, memory. All else is tensors and book-keeping.

`HostDevice` is the same for CPU tensors, where everything is done when the call returns and a graph is a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Replay = Callable[[], None]


class Download(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> torch.Tensor:
        """The tensor on the host; blocks until it is there."""
        ...


class Device(Protocol):
    """A device to run on, by one thread."""

    device: torch.device

    def activate(self) -> None:
        """Make this the device of the calling thread."""
        ...

    def capture(self, run: Callable[[], None]) -> Replay:
        """Record what `run` does to tensors that stay where they are; call the result to do it again."""
        ...

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `host` into `target` before what is submitted next; `host` may be reused at once."""
        ...

    def download(self, source: torch.Tensor) -> Download:
        """Copy `source` as it is after what was submitted so far."""
        ...

    def measure(self, run: Callable[[], object]) -> int:
        """Bytes that `run` needs at its peak beyond what is allocated now."""
        ...

    def free_bytes(self) -> int:
        """Bytes that could still be allocated."""
        ...


class _Ready:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor


class HostDevice:
    """CPU tensors. `memory` is what `free_bytes` says."""

    def __init__(self, memory: int = 0) -> None:
        """See the class."""
        self.device = torch.device("cpu")
        self._memory = memory

    def activate(self) -> None:
        """See Device."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """See Device."""
        return run

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """See Device."""
        target.copy_(host)

    def download(self, source: torch.Tensor) -> Download:
        """See Device."""
        return _Ready(source.clone())

    def measure(self, run: Callable[[], object]) -> int:
        """See Device; nothing is measured here."""
        run()
        return 0

    def free_bytes(self) -> int:
        """See Device."""
        return self._memory


class _PinnedDownload:
    def __init__(self, source: torch.Tensor) -> None:
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> torch.Tensor:
        self._event.synchronize()
        return self._host


class CudaDevice:
    """A GPU: everything on its current stream, graphs in one memory pool. Written without a GPU to run it on."""

    def __init__(self, device: torch.device) -> None:
        """See the class."""
        self.device = device
        self.activate()
        self._pool = torch.cuda.graph_pool_handle()

    def activate(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.device)

    def capture(self, run: Callable[[], None]) -> Replay:
        """See Device. `run` is called once before, so that nothing is compiled or allocated for the first time."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """See Device. Torch does not hand out pinned memory again before the copies out of it have ended."""
        target.copy_(host.pin_memory(), non_blocking=True)

    def download(self, source: torch.Tensor) -> Download:
        """See Device."""
        return _PinnedDownload(source)

    def measure(self, run: Callable[[], object]) -> int:
        """See Device."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def free_bytes(self) -> int:
        """See Device; what torch holds without using it counts as free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
