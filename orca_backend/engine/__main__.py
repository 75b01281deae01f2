"""The engine process: loads the model, allocates the K/V pool, and serves the channel it inherited.

Started by the serving side as `python -m orca_backend.engine --fd N --config JSON --parent PID`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import msgspec
import torch

from orca_backend.channel import Channel, EngineInfo, Ready, StartFailed
from orca_backend.config import EngineConfig, parse_bytes
from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.engine.device import CudaDevice, Device, HostDevice
from orca_backend.engine.engine import Engine
from orca_backend.engine.recorder import Recorder
from orca_backend.engine.runner import ModelRunner
from orca_backend.engine.sampler import CompiledSampler, NumpySampler, Sampler
from orca_backend.engine.worker import LaunchingRunner, Runner
from orca_backend.models.compiled import CompiledDecoder
from orca_backend.models.decoder import Decoder
from orca_backend.models.spec import ModelSpec
from orca_backend.models.weights import load_decoder
from orca_backend.scheduler.policies import make_scheduler
from orca_backend.scheduler.scheduler import Scheduler
from orca_kernels import cpu, dispatch
from orca_kernels.linear import WeightKind

if TYPE_CHECKING:
    from orca_backend.engine.lookahead import Lookahead

logger = logging.getLogger(__name__)

CPU_MEMORY = "256MiB"  # of the K/V pool, unless something else is asked for

Kernels = Literal["compiled", "triton", "torch"]

# Who multiplies by such weights.
QUANTIZED: dict[str, list[Kernels]] = {
    "none": ["compiled", "triton", "torch"],
    "int8": ["compiled"],
    "int8_weight": ["compiled", "triton"],
    "int4_weight": ["compiled", "triton"],
    "fp8_weight": ["triton"],
}


class StartError(RuntimeError):
    """The engine cannot start with this configuration; the message says what to change."""


def choose_device(name: str) -> torch.device:
    """The device of `config.device`; "auto" is the first GPU if there is one. Raises StartError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartError(
            f"device: {name} is not there; torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        )
    return device


def choose_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of `config.dtype`; "auto" is the checkpoint's, where the device computes in it natively."""
    if name != "auto":
        return getattr(torch, name)
    dtype = getattr(torch, checkpoint_dtype)
    if device.type == "cpu" and (dtype == torch.float16 or not torch.cpu._is_avx512_bf16_supported()):
        return torch.float32
    return dtype


def choose_kernels(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels of `config.kernels`; "auto": the fast ones of the device, or plain torch where they cannot be had.

    Raises StartError, saying why, if those that a setting needs cannot be had.
    """
    fast: Kernels = "compiled" if device.type == "cpu" else "triton"
    kernels = fast if config.kernels == "auto" else config.kernels
    obstacle = None
    if kernels == "triton":
        obstacle = dispatch.obstacle(dtype, device, float8=config.kv_cache.dtype == "fp8")
    elif kernels == "compiled":
        if device.type != "cpu":
            obstacle = f"compiled kernels are for CPU, the device is {device}"
        elif config.kv_cache.block_size % cpu.PAGE:
            obstacle = f"kv_cache.block_size must be a multiple of {cpu.PAGE}"
        else:
            obstacle = cpu.obstacle(dtype)
    if obstacle is not None:
        kernels = "torch"
    for applies, setting, possible in (
        (config.kernels != "auto", f"kernels: {config.kernels}", [config.kernels]),
        (True, f"quantization: {config.quantization}", QUANTIZED[config.quantization]),
        (config.kv_cache.dtype == "fp8", "kv_cache.dtype: fp8", ["triton"]),
        (config.deterministic, "deterministic: true", ["compiled", "triton"]),
    ):
        if applies and kernels not in possible:
            why = f"here they are {kernels}: {obstacle or f'the device is {device}'}"
            raise StartError(f"{setting} needs {' or '.join(possible)} kernels; {why}")
    if kernels == "torch":
        logger.warning("plain torch kernels: %s", obstacle or "they were asked for")
    return kernels


def count_slots(config: EngineConfig, bytes_per_token: int) -> int:
    """Slots of the K/V pool in whole blocks. Raises StartError if not even one block fits."""
    block_size = config.kv_cache.block_size
    if (config.kv_cache.n_slots or block_size) < block_size:
        raise StartError(f"kv_cache.n_slots: {config.kv_cache.n_slots} is less than one block of {block_size} tokens")
    memory = CPU_MEMORY if config.kv_cache.memory == "auto" else config.kv_cache.memory
    slots = config.kv_cache.n_slots or parse_bytes(memory) // bytes_per_token
    slots -= slots % block_size
    if slots <= 0:
        need = bytes_per_token * block_size
        raise StartError(f"kv_cache.memory holds no block of {block_size} tokens: raise it to at least {need} bytes")
    return slots


def count_swap_slots(config: EngineConfig, bytes_per_token: int) -> int:
    """Slots of the swap memory in whole blocks; 0 without any. Raises StartError for memory that holds no block."""
    memory, need = parse_bytes(config.kv_cache.swap_memory), bytes_per_token * config.kv_cache.block_size
    if 0 < memory < need:
        raise StartError(f"kv_cache.swap_memory: {memory} bytes hold no block: raise it to at least {need}")
    return memory // need * config.kv_cache.block_size


def fit_slots(
    config: EngineConfig, device: Device, decoder: Decoder, kv_dtype: torch.dtype, bytes_per_token: int
) -> int:
    """Slots of the K/V pool on a GPU beside the weights: what is asked for, or with "auto" all that there is room for.

    Raises OutOfDeviceMemoryError, saying what to lower, if they do not fit.
    """
    from orca_backend.engine import memory_profile
    from orca_backend.engine.gpu_runner import MAX_PASS_TOKENS
    from orca_backend.engine.sequence_table import SequenceTable

    spec, block_size, max_bs = decoder.spec, config.kv_cache.block_size, config.scheduler.max_bs
    longest = min(config.limits.max_model_len or spec.max_positions, spec.max_positions)
    asked = config.kv_cache.n_slots is not None or config.kv_cache.memory != "auto"
    return memory_profile.count_slots(
        device.free_bytes(),
        memory_profile.measure_iteration(
            device,
            decoder,
            kv_dtype,
            block_size=block_size,
            max_tokens=config.scheduler.budget or MAX_PASS_TOKENS,
            max_bs=max_bs,
        ),
        SequenceTable.num_bytes(max_bs * config.scheduler.n_workers, -(-longest // block_size), spec.vocab_size),
        bytes_per_token=bytes_per_token,
        block_size=block_size,
        longest=longest if config.limits.max_model_len else block_size,
        wanted=count_slots(config, bytes_per_token) if asked else None,
    )


def make_sampler(vocab_size: int, kernels: str, device: torch.device, threads: int) -> Sampler:
    """Compiled beside a compiled decoder, with the same threads, and on the host of a GPU, if it can be built there."""
    if kernels == "compiled":
        return CompiledSampler(vocab_size, cpu.team(threads))
    if device.type != "cpu" and cpu.obstacle(torch.float32) is None:
        return CompiledSampler(vocab_size)
    return NumpySampler(vocab_size)


def load(config: EngineConfig) -> tuple[Scheduler | Lookahead, Runner | LaunchingRunner, EngineInfo]:
    """Load all that an engine drives. Raises StartError, OSError or ValueError with a message for the operator."""
    started = time.perf_counter()
    device = choose_device(config.device)
    spec = ModelSpec.read(config.model)
    dtype = choose_dtype(config.dtype, spec.dtype, device)
    kernels = choose_kernels(config, dtype, device)
    dispatch.configure("triton" if kernels == "triton" else "torch", deterministic=config.deterministic)
    head_dim_multiple = cpu.LANES if kernels == "compiled" else 1
    kv_dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(config.kv_cache.dtype, dtype)
    bytes_per_token = AttentionKV.bytes_per_token(spec, kv_dtype, head_dim_multiple)
    compressed = kernels == "triton" and config.quantization != "none"
    weight_kind = cast(WeightKind, config.quantization) if compressed else None
    loaded, _ = load_decoder(config.model, dtype, device, weight_kind)
    if kernels == "triton" and device.type == "cuda":
        gpu: Device = CudaDevice(device)
        n_slots = fit_slots(config, gpu, loaded, kv_dtype, bytes_per_token)
    else:
        gpu = HostDevice()
        n_slots = count_slots(config, bytes_per_token)
    threads = config.threads or len(os.sched_getaffinity(0))
    decoder: Decoder | CompiledDecoder = loaded
    if kernels == "compiled":
        decoder = CompiledDecoder(loaded, threads, cpu.Quantization(config.quantization))
    block_size = config.kv_cache.block_size
    swap_slots = count_swap_slots(config, bytes_per_token)
    try:
        kv = AttentionKV(
            spec, n_slots, kv_dtype, device, head_dim_multiple, block_size=block_size, num_swap_slots=swap_slots
        )
    except (OSError, OverflowError, RuntimeError) as error:
        need = (n_slots + swap_slots) * bytes_per_token
        raise StartError(
            f"kv_cache: {n_slots} slots and {swap_slots} for swapping take {need} bytes, which cannot be had: "
            f"{error}; lower memory, n_slots or swap_memory"
        ) from error
    max_model_len = min(config.limits.max_model_len or spec.max_positions, spec.max_positions, n_slots)
    scheduler = make_scheduler(
        config.scheduler,
        n_slots=n_slots,
        block_size=block_size,
        max_model_len=max_model_len,
        prefix_cache=config.kv_cache.prefix_cache,
        swap_slots=swap_slots,
    )
    runner: Runner | LaunchingRunner
    planner: Scheduler | Lookahead = scheduler
    if kernels == "triton":
        from orca_backend.engine.gpu_runner import MAX_PASS_TOKENS, GpuRunner
        from orca_backend.engine.lookahead import Lookahead

        runner = GpuRunner(
            gpu,
            loaded,
            kv,
            block_size=block_size,
            max_bs=config.scheduler.max_bs,
            max_sequences=config.scheduler.max_bs * config.scheduler.n_workers,
            max_model_len=max_model_len,
            max_tokens=config.scheduler.budget or MAX_PASS_TOKENS,
        )
        if Lookahead.suits(scheduler):
            planner = Lookahead(scheduler)
    else:
        sampler = make_sampler(spec.vocab_size, kernels, device, threads)
        runner = ModelRunner(decoder, kv, sampler, block_size=block_size, device=device)
    info = EngineInfo(
        model_name=Path(config.model).name,
        architecture=spec.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        kernels=kernels,
        quantization=config.quantization,
        policy=config.scheduler.policy,
        max_model_len=max_model_len,
        max_bs=config.scheduler.max_bs,
        n_workers=config.scheduler.n_workers,
        n_slots=n_slots,
        block_size=block_size,
        vocab_size=spec.vocab_size,
        weight_bytes=decoder.num_bytes,
        kv_bytes=kv.num_bytes,
        load_seconds=time.perf_counter() - started,
        pid=os.getpid(),
    )
    return planner, runner, info


def main() -> int:
    """Run the engine process; its exit code."""
    parser = argparse.ArgumentParser(prog="orca_backend.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket of the request channel")
    parser.add_argument("--config", required=True, help="the EngineConfig as JSON")
    parser.add_argument("--parent", type=int, required=True, help="process id of the serving side, for the log")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="[orca engine] %(levelname)s %(message)s", stream=sys.stderr)
    # A Ctrl-C in the terminal goes to the whole group; when to end is for the serving side to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing to record yet
    channel = Channel.from_fd(arguments.fd)
    try:
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        planner, runner, info = load(config)
        recorder = Recorder(config.recorder, model=info.model_name, policy=info.policy)
        limit = config.limits.iteration_timeout
        engine = Engine(channel, planner, runner, info.vocab_size, recorder, iteration_timeout=limit)
    except Exception as error:
        logger.exception("the engine cannot start")
        channel.send(StartFailed(f"{type(error).__name__}: {error}"))
        return 1
    logger.info("ready in %.1f s: %s", info.load_seconds, info)
    channel.send(Ready(info))
    signal.signal(signal.SIGUSR1, lambda *_: engine.recorder.write())
    engine.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
