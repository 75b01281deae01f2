"""All kernels and two large models on an NVIDIA GPU, against specifications and floors: `make gpu-check`.

Needs torch >= 2.9 and triton >= 3.5 as they are there; no network, no checkpoint, no installation. The models are
random ones of the paper's 13B shape and of an 8B Llama: steps by themselves, and as the engine runs them (scheduler,
schedule-ahead and runner), for which msgspec must be there too. Prints a table and writes one JSON file; exits with 1
if a kernel is wrong or the engine fails, with 2 where there is no GPU. Written without a GPU to run it on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import gpu_floors
from bench.gpu_floors import Limits
from orca_backend.engine.attention_kv import AttentionKV
from orca_backend.models.spec import ModelSpec

if TYPE_CHECKING:
    from bench.gpu_engine import EngineLoop

BATCHES, CONTEXTS, PREFILL = (1, 8, 32, 64), (512, 2048), 2048
BLOCK_SIZE = 16
SECONDS = 330  # what has not begun by then is left out
REPEATS = 20
TRACED, TRACED_STEPS = (8, 512), 5  # batch and context of the steps that the profiler looks at
Seconds = Callable[[Callable[[], object], int], list[float]]


def obstacle() -> str | None:
    """Why this machine cannot be checked, or None."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU on this machine: run this where there is one"
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    for name, version, least in (("torch", torch.__version__, (2, 9)), ("triton", triton.__version__, (3, 5))):
        if tuple(int(part) for part in version.split(".")[:2]) < least:
            return f"{name} {version} is too old: at least {'.'.join(map(str, least))} is needed"
    return None


def gpu_seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds that the GPU takes for each of `repeats` calls, of which the host waits for none."""
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def measure_limits(device: torch.device) -> Limits:
    """The best of a few copies of 1 GiB and of a few large matrix products in bfloat16."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = min(gpu_seconds(lambda: target.copy_(source), 10))
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = min(gpu_seconds(lambda: a @ b, 10))
    return Limits(2 * source.nbytes / copying, 2 * 8192**3 / product)


def random_decoder(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of small random weights, made on the device."""
    from orca_backend.models.decoder import Decoder

    with torch.device("meta"):
        decoder = Decoder(spec).to(dtype)
    decoder.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            torch.nn.init.ones_(parameter)
        else:
            parameter.data.normal_(std=0.02, generator=generator)
    decoder.place(device)
    return decoder.eval()


class ModelCheck:
    """One random model: decode steps as graphs, prefill without, each against its floor."""

    def __init__(self, spec: ModelSpec, device: Any, dtype: torch.dtype, limits: Limits, seconds: Seconds) -> None:
        """`device` as in orca_backend.engine.device; `seconds` takes the time of calls."""
        self.spec, self.device, self.dtype, self.limits, self.seconds = spec, device, dtype, limits, seconds
        self.decoder = random_decoder(spec, device.device, dtype)
        self.steps: list[dict[str, Any]] = []
        self.notes: dict[str, str] = {}

    @torch.inference_mode()
    def decode(self, batch: int, context: int) -> Any:
        """Measure one size of batch; gives what runs a step, None if its K/V do not fit."""
        from orca_backend.engine.decode_graphs import DecodeGraphs
        from orca_backend.engine.sequence_table import SequenceTable

        per_token = AttentionKV.bytes_per_token(self.spec, self.dtype)
        blocks = context // BLOCK_SIZE + 1
        need = batch * blocks * BLOCK_SIZE * per_token
        if self.device.device.type == "cuda" and need > 0.9 * self.device.free_bytes():
            skipped = f"left out: K/V of {need / 2**30:.0f} GiB do not fit"
            self.steps.append({"kind": "decode", "batch": batch, "tokens": context, "skipped": skipped})
            return None
        kv = AttentionKV(self.spec, batch * blocks * BLOCK_SIZE, self.dtype, self.device.device, block_size=BLOCK_SIZE)
        table = SequenceTable(self.device, capacity=batch, max_blocks=blocks, vocab_size=self.spec.vocab_size)
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0))
        table.blocks.copy_(order.view(batch, blocks))
        for slot in range(batch):
            table.sampler.put(
                slot, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0,
                seed=0, min_position=0, prompt_ids=[], output_ids=[], stop_ids=[],
            )  # fmt: skip
        graphs = DecodeGraphs(
            self.device, self.decoder, kv, table, max_bs=batch, block_size=BLOCK_SIZE, buckets=[batch]
        )
        rows = [(slot, context, 7) for slot in range(batch)]
        taken = self.seconds(lambda: graphs.run(rows), REPEATS)
        started = time.perf_counter()
        for _ in range(REPEATS):
            graphs.run(rows)
        host = (time.perf_counter() - started) / REPEATS
        work = gpu_floors.decode_work(
            self.spec, batch, context, itemsize=self.dtype.itemsize, kv_bytes_per_token=per_token
        )
        more = {"host us": 1e6 * host}
        self.steps.append(
            gpu_floors.entry("decode", batch, context, statistics.median(taken), work, self.limits, **more)
        )
        return torch.inference_mode()(lambda: graphs.run(rows))

    @torch.inference_mode()
    def prefill(self, tokens: int) -> None:
        """Measure one prompt."""
        from orca_kernels import AttentionMetadata

        device = self.device.device
        blocks = math.ceil(tokens / BLOCK_SIZE)
        kv = AttentionKV(self.spec, blocks * BLOCK_SIZE, self.dtype, device, block_size=BLOCK_SIZE)
        metadata = AttentionMetadata.build([tokens], [0], [list(range(blocks))], BLOCK_SIZE, device)
        ids, last = torch.full((tokens,), 7, device=device), torch.tensor([tokens - 1], device=device)
        taken = self.seconds(lambda: self.decoder(ids, metadata, kv, last), 5)
        work = gpu_floors.prefill_work(self.spec, tokens, itemsize=self.dtype.itemsize)
        self.steps.append(gpu_floors.entry("prefill", 1, tokens, statistics.median(taken), work, self.limits))

    def engine(
        self, loop: EngineLoop, sizes: Iterable[tuple[int, int]], prefill: int, repeats: int, left: Callable[[], bool]
    ) -> None:
        """Measure the engine: prompts alone, then steady decode steps of (batch, context), while time is `left`."""
        from bench.gpu_engine import median

        per_token = AttentionKV.bytes_per_token(self.spec, self.dtype)
        itemsize = self.dtype.itemsize
        step = median(loop.prefill(prefill, 5))
        work = gpu_floors.prefill_work(self.spec, prefill, itemsize=itemsize)
        host = {"host us": 1e6 * step.host}
        self.steps.append(gpu_floors.entry("engine prefill", 1, prefill, step.seconds, work, self.limits, **host))
        for batch, context in sizes:
            skipped = "" if left() else "left out: no time left"
            if not loop.holds(batch, context + repeats):
                skipped = f"left out: the K/V pool has {loop.n_slots} slots"
            if skipped:
                self.steps.append({"kind": "engine decode", "batch": batch, "tokens": context, "skipped": skipped})
                continue
            step = median(loop.decode(batch, context, repeats))
            work = gpu_floors.decode_work(self.spec, batch, context, itemsize=itemsize, kv_bytes_per_token=per_token)
            host = {"host us": 1e6 * step.host}
            self.steps.append(
                gpu_floors.entry("engine decode", batch, context, step.seconds, work, self.limits, **host)
            )

    def deterministic(self, batch: int, context: int) -> None:
        """What it costs that a row does not depend on its batch."""
        from orca_kernels import dispatch

        usual = next((s for s in self.steps if (s["batch"], s["tokens"]) == (batch, context) and "ms" in s), None)
        if usual is None:
            return
        dispatch.configure("triton", deterministic=True)
        try:
            self.decode(batch, context)
        finally:
            dispatch.configure("triton")
        slower = self.steps.pop()["ms"] / usual["ms"]
        self.notes["deterministic"] = f"{slower:.2f} times the milliseconds of a step, {batch} x {context} tokens"


def check_engine(model: ModelCheck, compilations: Callable[[], int], left: Callable[[], bool]) -> None:
    """Measure the engine around `model`, while time is `left`, its idle time and compilations while it serves."""
    try:
        from bench.gpu_engine import EngineLoop
    except ModuleNotFoundError as error:
        model.notes["engine"] = f"left out: its scheduler needs {error.name}, which is not installed"
        return
    from orca_backend.engine.memory_profile import OutOfDeviceMemoryError

    longest = max(CONTEXTS) + REPEATS
    try:
        loop = EngineLoop(
            model.device, model.decoder, model.dtype, block_size=BLOCK_SIZE, max_bs=max(BATCHES), max_model_len=longest
        )
    except OutOfDeviceMemoryError as error:
        model.notes["engine"] = f"left out: {error}"
        return
    before = compilations()
    sizes = [(batch, context) for context in CONTEXTS for batch in BATCHES]
    model.engine(loop, sizes, PREFILL, REPEATS, left)
    loop.submit(*TRACED, 4 + TRACED_STEPS)
    for _ in range(3):  # the prompts, and until two decode iterations are in flight
        loop.step()
    share, gap = idle_share(loop.step)
    loop.finish()
    model.notes["engine idle"] = (
        f"{share:.1%} of the time between kernels, {gap:.1f} us a gap, {TRACED[0]} x {TRACED[1]} tokens"
    )
    model.notes["engine compiled while running"] = str(compilations() - before)


def idle_share(run: Callable[[], object]) -> tuple[float, float]:
    """Of a few steps: the share of time in which no kernel runs, and microseconds between kernels, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(TRACED_STEPS):
            run()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return idle_of(spans)


def idle_of(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """The share of idle time between the first begin and the last end, and its mean length per gap."""
    spans = sorted(spans)
    gaps: list[float] = []
    end = spans[0][1]
    for begin, finish in spans[1:]:
        if begin > end:
            gaps.append(begin - end)
        end = max(end, finish)
    return sum(gaps) / max(end - spans[0][0], 1e-9), sum(gaps) / max(len(gaps), 1)


def count_compilations() -> Callable[[], int]:
    """Counts from now on; the call says how many."""
    import triton

    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **options: compiled.append(str(options.get("repr")))
    return lambda: len(compiled)


def check_kernels(device: torch.device, dtype: torch.dtype, hidden: int) -> list[dict[str, Any]]:
    """Every kernel: name, error, whether that is small enough; what cannot run is wrong."""
    from bench.gpu_kernels import TOLERANCE, checks

    results = []
    for name, error in checks(device, dtype, hidden):
        try:
            value = error()
        except Exception as failure:  # one kernel that cannot run must not hide the others
            results.append({"name": name, "error": math.inf, "passed": False, "failure": repr(failure)})
            continue
        limit = 0.0 if name.startswith("sampling") else TOLERANCE
        results.append({"name": name, "error": value, "passed": value <= limit})
    return results


def main() -> int:
    """Check this machine; the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gpu_check", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("run/gpu-check.json"))
    arguments = parser.parse_args()
    if (why := obstacle()) is not None:
        print(f"gpu-check cannot run: {why}", file=sys.stderr)
        return 2
    from orca_backend.engine.device import CudaDevice
    from orca_kernels import dispatch

    started = time.monotonic()
    device = CudaDevice(torch.device("cuda", 0))
    compilations = count_compilations()
    limits = measure_limits(device.device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "limits": {"copy GB/s": limits.bytes_per_second / 1e9, "matrix TFLOP/s": limits.operations_per_second / 1e12},
        "kernels": check_kernels(device.device, torch.bfloat16, hidden=4096),
        "models": {},
    }
    dispatch.configure("triton")
    for name, spec in gpu_floors.SHAPES.items():
        model = ModelCheck(spec, device, torch.bfloat16, limits, gpu_seconds)
        for batch, context in [(batch, context) for context in CONTEXTS for batch in BATCHES]:
            if time.monotonic() - started > SECONDS:
                skipped = "left out: no time left"
                model.steps.append({"kind": "decode", "batch": batch, "tokens": context, "skipped": skipped})
                continue
            run = model.decode(batch, context)
            if run is not None and (batch, context) == TRACED:
                before = compilations()
                share, gap = idle_share(run)
                model.notes["idle"] = (
                    f"{share:.1%} of the time between kernels, {gap:.1f} us a gap, {TRACED[0]} x {TRACED[1]} tokens"
                )
                model.notes["compiled while running"] = str(compilations() - before)
            del run
        if time.monotonic() - started < SECONDS:
            model.prefill(PREFILL)
            model.deterministic(*TRACED)
            try:
                check_engine(model, compilations, lambda: time.monotonic() - started < SECONDS)
            except Exception as failure:  # what has been measured must not be lost
                model.notes["engine"] = f"FAILED: {failure!r}"
        weights = sum(parameter.nbytes for parameter in model.decoder.parameters()) / 1e9
        report["models"][name] = {"weights GB": weights, "steps": model.steps, "notes": model.notes}
        del model
    report["seconds"] = time.monotonic() - started
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1))
    print(gpu_floors.table(report))
    print(f"\n{report['seconds']:.0f} s; {arguments.output}")
    failed = [name for name, model in report["models"].items() if model["notes"].get("engine", "").startswith("FAILED")]
    return 0 if not failed and all(check["passed"] for check in report["kernels"]) else 1


if __name__ == "__main__":
    sys.exit(main())
