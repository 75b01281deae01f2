"""What the server says of itself while it is under load: its /metrics, and the memory of its processes."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec
import psutil

PERIOD_S = 0.5  # models publish their metrics twice a second

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$", re.MULTILINE)


class Metrics:
    """Metrics as of one moment, read from `text` in the Prometheus format."""

    def __init__(self, text: str) -> None:
        self._samples = [(m[1], m[2] or "", float(m[3])) for m in _SAMPLE.finditer(text)]

    @classmethod
    def read(cls, url: str) -> Metrics:
        """The metrics at `url`. Raises OSError."""
        with urllib.request.urlopen(url, timeout=5) as response:
            return cls(response.read().decode())

    def total(self, name: str, *labels: str) -> float:
        """The sum of all samples of `name` that have every one of `labels`, written kind="mixed"."""
        return sum(
            value for sample, has, value in self._samples if sample == name and all(label in has for label in labels)
        )


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One sample, taken at `time` of the monotonic clock. Slots are tokens of K/V; `memory` is resident bytes."""

    time: float
    running: float
    waiting: float
    slots_reserved: float
    slots_used: float
    slots_total: float
    iterations: float  # since the server started
    memory: int = 0


class Monitor:
    """Context manager: samples a model's gauges, and the memory of the processes that `pids` gives, in a thread."""

    def __init__(
        self, metrics_url: str, model: str, pids: Callable[[], Sequence[int]] = list, period: float = PERIOD_S
    ) -> None:
        self._url = metrics_url
        self._label = f'model="{model}"'
        self._pids = pids
        self._period = period
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self.moments: list[Moment] = []

    def _run(self) -> None:
        while True:
            # A server that starts, stops or stalls leaves a gap in the timeline.
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                self.moments.append(self._sample())
            if self._stopping.wait(self._period):
                return

    def _sample(self) -> Moment:
        metrics = Metrics.read(self._url)
        return Moment(
            time=time.monotonic(),
            running=metrics.total("orca_requests_running", self._label),
            waiting=metrics.total("orca_requests_waiting", self._label),
            slots_reserved=metrics.total("orca_kv_slots", self._label, 'state="reserved"'),
            slots_used=metrics.total("orca_kv_slots", self._label, 'state="used"'),
            slots_total=metrics.total("orca_kv_slots", self._label, 'state="total"'),
            iterations=metrics.total("orca_iterations_total", self._label),
            memory=sum(psutil.Process(pid).memory_info().rss for pid in self._pids()),
        )

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
