"""What the server publishes about a model on Triton's /metrics.

A call into Triton's metrics is a round trip to the server through one thread that the whole stub shares. So everything
is collected here in plain numbers, and a ticker publishes what has changed a few times a second: its cost does not grow
with the number of tokens. Times are in seconds.
The names are our own (`orca_`), and those that dashboards and gateways of vLLM (`vllm:`) and TensorRT-LLM
(`nv_trt_llm_`) look for; every metric carries the labels model, version and policy.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orca_backend.channel import EngineInfo, Heartbeat, IterationReport, Occupancy
from orca_backend.serving.histogram import Histogram

PERIOD = 0.5

ERROR_CODES = (
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)
_SLOT_STATES = ("reserved", "used", "total")
_KINDS = ("prefill", "decode", "mixed")

# name: (description, label of its own, the label's values)
_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "orca_iterations_total": ("Iterations that have returned, by what their rows were", "kind", _KINDS),
    "orca_failures_total": ("Requests that ended with an error, by its code", "reason", ERROR_CODES),
    "orca_finished_total": ("Requests that ended well", "reason", ("stop", "length")),
    "orca_engine_restarts_total": ("Times that the engine process was started again", "", ("",)),
    "orca_preemptions_total": ("Times that a request lost its K/V slots to another", "", ("",)),
    "orca_expired_total": (
        "Requests ended because they waited for too long or cannot meet a deadline",
        "",
        ("",),
    ),
    "vllm:prompt_tokens_total": ("Prompt tokens of the requests that ended well", "", ("",)),
    "vllm:generation_tokens_total": ("Generated tokens", "", ("",)),
    "vllm:num_preemptions_total": ("Times that a request lost its K/V slots to another", "", ("",)),
    "vllm:prefix_cache_queries_total": ("Prompt tokens looked up in the prefix cache", "", ("",)),
    "vllm:prefix_cache_hits_total": ("Prompt tokens found in the prefix cache", "", ("",)),
}
# What the engine counts itself (`Occupancy`), under our names.
_ENGINE_COUNTERS = (
    ("orca_preemptions_total", "preemptions"),
    ("vllm:num_preemptions_total", "preemptions"),
    ("vllm:prefix_cache_queries_total", "prefix_queries"),
    ("vllm:prefix_cache_hits_total", "prefix_hits"),
)
_GAUGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "orca_requests_running": ("Requests that take part in iterations", "", ("",)),
    "orca_requests_waiting": ("Requests that wait in the engine for slots", "", ("",)),
    "orca_kv_slots": ("Attention K/V slots, in tokens", "state", _SLOT_STATES),
    "orca_engine_heartbeat_age_seconds": ("Time since the engine process was last heard of", "", ("",)),
    "vllm:num_requests_running": ("Requests that take part in iterations", "", ("",)),
    "vllm:num_requests_waiting": ("Requests that wait in the engine for slots", "", ("",)),
    "vllm:kv_cache_usage_perc": ("Reserved part of the K/V slots, 0 to 1", "", ("",)),
    "nv_trt_llm_request_metrics": (
        "Requests; `scheduled` and `context` as of the last iteration",
        "request_type",
        ("active", "max", "scheduled", "context", "waiting"),
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "Attention K/V blocks",
        "kv_cache_block_type",
        ("max", "free", "used", "tokens_per", "fraction"),
    ),
}
_LATENCY = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0]
_FIRST = [0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0]
_QUEUED = [*_FIRST, 60.0, 120.0, 300.0]
_BETWEEN = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
_POWERS = [float(1 << i) for i in range(14)]
_HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "orca_iteration_batch_size": ("Requests per iteration", _POWERS[:10]),
    "orca_iteration_tokens": ("Tokens per iteration", _POWERS),
    "vllm:request_queue_time_seconds": (
        "From the arrival of a request to its first iteration",
        _QUEUED,
    ),
    "vllm:time_to_first_token_seconds": ("From the arrival of a request to its first token", _FIRST),
    "vllm:time_per_output_token_seconds": ("From one token of a request to the next", _BETWEEN),
    "vllm:e2e_request_latency_seconds": ("From the arrival of a request to its last token", _LATENCY),
    "vllm:request_prompt_tokens": ("Prompt tokens per request", _POWERS),
    "vllm:request_generation_tokens": ("Generated tokens per request", _POWERS),
}

Key = tuple[str, str]  # name, value of its own label


class Metrics:
    """Collects from any thread, publishes from its own.

    `family_class` is `pb_utils.MetricFamily`; `labels` are put on everything.
    """

    def __init__(
        self, family_class: Any, labels: dict[str, str], log: Callable[[str], None], *, period: float = PERIOD
    ) -> None:
        """Register every metric with the server, then start the ticker."""
        self._log = log
        self._period = period
        self._lock = threading.Lock()
        self._increments: defaultdict[Key, float] = defaultdict(float)
        self._values: dict[Key, float] = {}
        self._counted = Occupancy()  # how far the engine's own counters have been taken over
        self._heard = time.monotonic()
        self._block_size = 1
        self._families: list[Any] = []  # a family that is forgotten takes its metrics with it
        self._handles: dict[Key, Any] = {}
        self._histograms = {name: Histogram(name, bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        parts = {
            part: (_HISTOGRAMS[name][0], "le", tuple(bounds))
            for name, histogram in self._histograms.items()
            for part, bounds in histogram.counters()
        }
        for kind, table in ((family_class.COUNTER, _COUNTERS | parts), (family_class.GAUGE, _GAUGES)):
            for name, (description, label, label_values) in table.items():
                family = family_class(name=name, description=description, kind=kind)
                self._families.append(family)
                for value in label_values:
                    own = {label: value} if value else {}
                    self._handles[name, value] = family.Metric(labels={**labels, **own})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish once more, end the ticker, and give the metrics back to the server."""
        self._stopping.set()
        self._thread.join()
        self._handles.clear()
        self._families.clear()

    # ------------------------------------------------------------------ what happened

    def engine_started(self, info: EngineInfo) -> None:
        """An engine is ready."""
        with self._lock:
            self._heard = time.monotonic()
            self._block_size = info.block_size
            blocks = "nv_trt_llm_kv_cache_block_metrics"
            self._values[blocks, "tokens_per"] = info.block_size
            self._values[blocks, "max"] = info.n_slots // info.block_size
            self._values["nv_trt_llm_request_metrics", "max"] = info.max_bs * info.n_workers
            self._occupied(Occupancy(slots_total=info.n_slots))

    def engine_restarted(self, info: EngineInfo) -> None:
        """Another engine is ready after one died."""
        self.engine_started(info)
        with self._lock:
            self._increments["orca_engine_restarts_total", ""] += 1

    def engine_reported(self, report: IterationReport | Heartbeat) -> None:
        """The engine was heard of; perhaps an iteration returned."""
        with self._lock:
            self._heard = time.monotonic()
            self._occupied(report.occupancy)
            self._count(report.occupancy)
            if isinstance(report, IterationReport) and report.num_rows:
                prefill = report.num_prefill_rows
                kind = "decode" if not prefill else "prefill" if prefill == report.num_rows else "mixed"
                self._increments["orca_iterations_total", kind] += 1
                self._histograms["orca_iteration_batch_size"].observe(report.num_rows)
                self._histograms["orca_iteration_tokens"].observe(report.num_tokens)
                self._values["nv_trt_llm_request_metrics", "scheduled"] = report.num_rows
                self._values["nv_trt_llm_request_metrics", "context"] = prefill

    def started(self, waited: float) -> None:
        """A request is in an iteration for the first time, `waited` seconds after it arrived."""
        with self._lock:
            self._histograms["vllm:request_queue_time_seconds"].observe(waited)

    def tokens_came(self, num_tokens: int, now: float, previous: float | None, arrived: float) -> None:
        """A request got `num_tokens` more tokens at `now`, the ones before at `previous` (None: these are the first).

        All times are values of time.monotonic().
        """
        if not num_tokens:
            return
        with self._lock:
            self._increments["vllm:generation_tokens_total", ""] += num_tokens
            if previous is None:
                self._histograms["vllm:time_to_first_token_seconds"].observe(now - arrived)
            else:
                gap = (now - previous) / num_tokens
                self._histograms["vllm:time_per_output_token_seconds"].observe(gap, num_tokens)

    def finished(self, arrived: float, num_input_tokens: int, num_output_tokens: int, reason: str) -> None:
        """A request ended well."""
        with self._lock:
            self._increments["orca_finished_total", reason] += 1
            self._increments["vllm:prompt_tokens_total", ""] += num_input_tokens
            self._histograms["vllm:e2e_request_latency_seconds"].observe(time.monotonic() - arrived)
            self._histograms["vllm:request_prompt_tokens"].observe(num_input_tokens)
            self._histograms["vllm:request_generation_tokens"].observe(num_output_tokens)

    def expired(self) -> None:
        """The scheduler has ended a request for which it was too late; that it failed is counted besides."""
        with self._lock:
            self._increments["orca_expired_total", ""] += 1

    def failed(self, code: str) -> None:
        """A request ended with an error."""
        with self._lock:
            self._increments["orca_failures_total", code if code in ERROR_CODES else "UNKNOWN"] += 1

    def _occupied(self, occupancy: Occupancy) -> None:
        """The caller holds the lock."""
        values = self._values
        for prefix in ("orca_requests_", "vllm:num_requests_"):
            values[f"{prefix}running", ""] = occupancy.running
            values[f"{prefix}waiting", ""] = occupancy.waiting
        requests, blocks = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
        values[requests, "active"] = occupancy.running + occupancy.waiting
        values[requests, "waiting"] = occupancy.waiting
        values["orca_kv_slots", "reserved"] = occupancy.slots_reserved
        values["orca_kv_slots", "used"] = occupancy.slots_used
        values["orca_kv_slots", "total"] = occupancy.slots_total
        used = -(-occupancy.slots_reserved // self._block_size)
        fraction = occupancy.slots_reserved / occupancy.slots_total if occupancy.slots_total else 0.0
        values["vllm:kv_cache_usage_perc", ""] = values[blocks, "fraction"] = fraction
        values[blocks, "used"] = used
        values[blocks, "free"] = occupancy.slots_total // self._block_size - used

    def _count(self, occupancy: Occupancy) -> None:
        """Take over what the engine has counted since it was last heard of. The caller holds the lock."""
        for name, counter in _ENGINE_COUNTERS:
            now, before = getattr(occupancy, counter), getattr(self._counted, counter)
            self._increments[name, ""] += now - before if now >= before else now  # a new engine counts from zero
        self._counted = occupancy

    # ------------------------------------------------------------------ the ticker

    def _tick(self) -> None:
        published: dict[Key, float] = {}
        told = False
        while True:
            stopping = self._stopping.wait(self._period)
            with self._lock:
                increments, self._increments = self._increments, defaultdict(float)
                for histogram in self._histograms.values():
                    increments.update(histogram.take())
                values = dict(self._values)
                values["orca_engine_heartbeat_age_seconds", ""] = round(time.monotonic() - self._heard, 3)
            try:
                for key, increment in increments.items():
                    if increment:
                        self._handles[key].increment(increment)
                for key, value in values.items():
                    if published.get(key) != value:
                        self._handles[key].set(value)
                        published[key] = value
            except Exception as error:  # the server refuses metrics, for example with --allow-metrics=false
                if not told:
                    self._log(f"metrics cannot be published: {type(error).__name__}: {error}")
                told = True
            if stopping:
                return
