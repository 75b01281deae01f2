"""The engine's configuration: frozen, read once from engine.yaml, validated in one place.

Sizes are in tokens unless a unit is named. Relative paths are relative to the file they stand in.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from orca_backend.request import MAX_TOKENS, SamplingParams

# In the environment of all that descends from a server that was started from here: its directory, by which also orphans
# are known. And a file that appears there when the server is told to stop.
SERVER_MARK = "ORCA_SERVER"
STOPPING = "stopping"

Positive = Annotated[int, msgspec.Meta(ge=1)]
# Finite, since JSON has no infinity; and the standard library's timers overflow not far above.
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str | int) -> int:
    """Bytes from a number or from text such as "256MiB", "1.5 GB", "4096". Units are powers of 1024.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f"not a size in bytes: {text!r} (write for example 256MiB)")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Order = Literal["fcfs", "priority", "shortest", "deadline", "fair", "cached"]
Admission = Literal["orca", "max", "peak", "prompt"]
Selection = Literal["orca", "token_budget", "prefill_first", "static", "static_shortest"]
Preemption = Literal["none", "recompute", "swap"]


class Parts(NamedTuple):
    """The four exchangeable parts of the scheduler; docs/policies.md describes them."""

    order: Order
    admission: Admission
    selection: Selection
    preemption: Preemption


POLICIES: dict[str, Parts] = {
    "orca": Parts("fcfs", "orca", "orca", "none"),
    "orca_max": Parts("fcfs", "max", "orca", "none"),
    "peak": Parts("fcfs", "peak", "orca", "none"),
    "vllm": Parts("fcfs", "prompt", "prefill_first", "recompute"),
    "sarathi": Parts("fcfs", "prompt", "token_budget", "recompute"),
    "static_fair": Parts("fcfs", "orca", "static", "none"),
    "static_ft": Parts("fcfs", "max", "static_shortest", "none"),
}


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Algorithm 1's knobs, `max_bs` requests per iteration and `n_workers` iterations in flight, and the policy.

    `policy` names four parts at once; a part that is given by itself replaces the policy's.
    """

    policy: Literal["orca", "orca_max", "peak", "vllm", "sarathi", "static_fair", "static_ft"] = "orca"
    order: Order | None = None
    admission: Admission | None = None
    selection: Selection | None = None
    preemption: Preemption | None = None
    max_bs: Positive = 32
    n_workers: Positive = 1
    token_budget: Positive | None = None  # tokens of one iteration, for selection token_budget; None: 512 (Sarathi's)
    watermark: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.01  # of blocks, left free by admission prompt (vLLM's)
    priority_seconds: PositiveSeconds = 10.0  # of waiting that outweigh one level of priority: ageing
    token_seconds: PositiveSeconds = 0.05  # of waiting that outweigh one token of expected output: ageing
    slack_seconds: PositiveSeconds = 60.0  # order deadline: what a request without a deadline is given
    max_queue_seconds: PositiveSeconds | None = None  # of waiting to be started, then UNAVAILABLE; None: no limit

    @property
    def parts(self) -> Parts:
        """The parts that run: those given, else the policy's."""
        policy = POLICIES[self.policy]
        return Parts(
            self.order or policy.order,
            self.admission or policy.admission,
            self.selection or policy.selection,
            self.preemption or policy.preemption,
        )

    @property
    def budget(self) -> int | None:
        """Most tokens of one iteration; None: no limit."""
        return (self.token_budget or 512) if self.parts.selection == "token_budget" else None

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together, with the reason."""
        _, admission, selection, preemption = self.parts
        if admission == "prompt" and preemption == "none":
            raise ValueError(
                "preemption: none with admission: prompt could run out of K/V slots; use recompute or swap"
            )
        if admission in ("orca", "max") and preemption != "none":
            raise ValueError(f"preemption: {preemption} has no use with admission: {admission}, which never runs short")
        if selection.startswith("static") and admission in ("peak", "prompt"):
            raise ValueError(
                f"admission: {admission} needs requests to leave when they end; selection: {selection} keeps them"
            )
        if admission == "peak" and preemption == "none" and (selection != "orca" or self.n_workers > 1):
            raise ValueError(
                "admission: peak without preemption holds only if every request runs in every iteration: "
                "selection: orca and n_workers: 1"
            )
        if self.token_budget is not None and selection != "token_budget":
            raise ValueError(f"token_budget has no use with selection: {selection}")
        if self.budget is not None and self.budget < self.max_bs:
            raise ValueError(f"token_budget: {self.budget} is below max_bs: {self.max_bs}, so not all could go on")


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The attention K/V pool, allocated once at start: `n_slots` tokens, or as many as fit in `memory`.

    `memory` "auto" is 256MiB, and on a GPU all that is left beside the weights and what an iteration needs.
    Slots are taken in blocks of `block_size`. `dtype` "auto" keeps K/V as they are computed, "int8" and "fp8" (e4m3,
    with `kernels` triton) round them with a scale for each token and head: about twice the slots in the same memory.
    `prefix_cache` shares the blocks of equal beginnings. `swap_memory` is host memory for requests that are preempted
    by swapping.
    """

    memory: str | int = "auto"
    n_slots: Positive | None = None
    dtype: Literal["auto", "int8", "fp8"] = "auto"
    block_size: Positive = 16
    prefix_cache: bool = False
    swap_memory: str | int = 0

    def __post_init__(self) -> None:
        """Reject sizes that cannot be read."""
        if self.memory != "auto":
            parse_bytes(self.memory)
        parse_bytes(self.swap_memory)


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may ask, and how long things may take (seconds)."""

    max_model_len: Positive | None = None  # prompt + generated tokens; None: the model's own limit
    max_queue_size: Positive = 1024  # requests that have not ended; one more is refused with UNAVAILABLE
    request_timeout: PositiveSeconds = 600.0  # deadline of a request that does not bring its own
    drain_timeout: PositiveSeconds = 20.0  # after the server began to stop; below its --exit-timeout-secs
    start_timeout: PositiveSeconds = 600.0  # from spawning the engine process to Ready
    iteration_timeout: PositiveSeconds = 600.0  # of one iteration: then the engine is silent, for it hangs
    engine_silence: PositiveSeconds = 30.0  # without a report or heartbeat: the engine hangs, it is killed and replaced


class RecorderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flight recorder: it keeps the last `capacity` iterations, 0 for none, and writes into the directory `path`.

    An iteration takes about 100 bytes for each of its rows. `path` is the system's directory for temporary files unless
    it is given.
    """

    capacity: Annotated[int, msgspec.Meta(ge=0)] = 4096
    path: str = msgspec.field(default_factory=tempfile.gettempdir)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one served model. `model` is a checkpoint directory made by `orca import-model`."""

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # int8: 8-bit products of weights and activations, compiled kernels only. Else weights kept in 8 or 4 bits:
    # fp8 (e4m3) by triton kernels only, the others by compiled and by triton ones.
    quantization: Literal["none", "int8", "int8_weight", "int4_weight", "fp8_weight"] = "none"
    # CPU: compiled here at first use; GPU: in the Triton language (which on CPU runs in its interpreter, for tests).
    kernels: Literal["auto", "compiled", "triton", "torch"] = "auto"
    deterministic: bool = False  # the same bits for a request alone and in any batch (compiled kernels always do that)
    threads: Positive | None = None  # compute threads on CPU; None: one per core
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    limits: LimitsConfig = LimitsConfig()
    recorder: RecorderConfig = RecorderConfig()
    sampling_defaults: SamplingParams = SamplingParams(max_tokens=MAX_TOKENS)

    def __post_init__(self) -> None:
        """Reject what would otherwise fail late: in the engine, or at every request."""
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        for name in self.sampling_defaults.unbuilt:
            raise ValueError(f"sampling_defaults.{name} = {getattr(self.sampling_defaults, name)!r} is not supported")
        defaults = self.sampling_defaults
        if defaults.min_tokens > (limit := MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens):
            raise ValueError(f"sampling_defaults.min_tokens: {defaults.min_tokens} is above max_tokens: {limit}")
        parts, swap = self.scheduler.parts, parse_bytes(self.kv_cache.swap_memory)
        if (parts.preemption == "swap") != (swap > 0):
            raise ValueError(
                f"scheduler.preemption: {parts.preemption} with kv_cache.swap_memory: {self.kv_cache.swap_memory}: "
                "swapping needs memory, and nothing else uses it"
            )
        if parts.order == "cached" and not self.kv_cache.prefix_cache:
            raise ValueError("scheduler.order: cached needs kv_cache.prefix_cache: true")
        if self.kv_cache.prefix_cache and parts.selection.startswith("static"):
            raise ValueError(f"kv_cache.prefix_cache has no use with scheduler.selection: {parts.selection}")


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the file and the field."""


def load_config(
    path: str | Path, overrides: dict[str, Any] | None = None, *, origin: str = "parameter"
) -> EngineConfig:
    """Read engine.yaml at `path`; `overrides` maps dotted names ("scheduler.max_bs") to values that win over it.

    `model` and `recorder.path` come back as absolute paths. Raises ConfigError naming the setting, and the file or, for
    an override, its `origin` ("--set", say).
    """
    path = Path(path)
    overrides = overrides or {}
    try:
        raw = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of settings")
    for name, value in overrides.items():
        section = raw
        *parents, leaf = name.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{_as_given(origin, name, value)}: {parent} has no settings of its own")
        section[leaf] = value
    try:
        config = msgspec.convert(raw, EngineConfig)
    except msgspec.ValidationError as error:
        setting, what = _in_words(str(error))
        given = [
            _as_given(origin, name, value)
            for name, value in overrides.items()
            if f"{name}.".startswith(f"{setting}.") or f"{setting}.".startswith(f"{name}.")
        ]
        where = ", ".join(given) or (f"{path}: {setting}" if setting else str(path))
        raise ConfigError(f"{where}: {what}") from error
    recorder = msgspec.structs.replace(config.recorder, path=str((path.parent / config.recorder.path).resolve()))
    return msgspec.structs.replace(config, model=str((path.parent / config.model).resolve()), recorder=recorder)


def _as_given(origin: str, name: str, value: Any) -> str:
    """An override as the user wrote it: --set scheduler.max_bs=0."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"{origin} {name}={text}"


def _in_words(error: str) -> tuple[str, str]:
    """The dotted name of the setting that a ValidationError is about ("" for the whole), and what is wrong with it."""
    what, _, place = error.partition(" - at `$.")
    setting = place.removesuffix("`")
    kind: Any = EngineConfig
    for part in setting.split(".") if setting else []:
        kind = next((field.type for field in msgspec.structs.fields(kind) if field.name == part), None)
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            break
    if unknown := re.search(r"unknown field `(.*?)`", what):
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        name = f"{setting}.{unknown[1]}" if setting else unknown[1]
        return name, f"unknown setting; {setting or 'the top'} has {known}"
    if what.startswith("Invalid enum value"):
        choices = [name for choice in get_args(kind) for name in get_args(choice) or [choice] if isinstance(name, str)]
        return setting, f"{what.replace('Invalid enum value', 'not')}; allowed are {', '.join(choices)}"
    return setting, what
