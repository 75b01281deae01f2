"""Many requests, a third of which are left at random moments: nothing stays behind, everybody else is served."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from servers import new_server
from wire import metric, post, wait_until_idle

from orca_backend.server.triton_server import TritonServer
from orca_client import AsyncOrcaClient, Finished, OrcaClient

DESERTER = Path(__file__).with_name("deserter.py")
DESERTERS, STREAMS = 3, 20  # client processes that are killed, and the requests that each holds
AT_ONCE = 24  # requests of the clients that live on
GROWTH = 4 << 20  # bytes in a round; the allocator alone takes up to 2.4 MB of it


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Slots for about ten requests at once, so that many wait."""
    settings = {"scheduler__max_bs": 16, "kv_cache__n_slots": 4096, "threads": 1, "limits__drain_timeout": 2.0}
    with new_server(tiny_llama, tmp_path_factory.mktemp("volume") / "triton.log", **settings) as server:
        yield server  # how it ends is not asked: Triton 2.51 may keep a model loaded whose streams were cancelled


class Plan:
    """One request: how much it asks, and after how many events or seconds it is left, if it is."""

    def __init__(self, generator: random.Random, doomed: bool) -> None:
        self.prompt = "".join(generator.choices("abcdefgh ", k=generator.randint(1, 120)))
        self.max_tokens = 350 if doomed else generator.randint(1, 40)  # so that those that are left are left in time
        self.events = generator.choice([0, 0, 1, 3, 9]) if doomed else None  # 0: not even the first is waited for
        # Not sooner: a cancel that arrives while Triton 2.51 still reads the request can crash it, whatever the model.
        self.pause = generator.choice([0.02, 0.05, 0.1])


def plans(count: int, doomed: int, seed: int) -> list[Plan]:
    generator = random.Random(seed)
    plans = [Plan(generator, index < doomed) for index in range(count)]
    generator.shuffle(plans)
    return plans


def outcome(plan: Plan, last: object) -> str:
    """ "left", "served", or what is wrong."""
    if isinstance(last, Finished):
        complete = (last.finish_reason, last.num_output_tokens) == ("length", plan.max_tokens)
        return "served" if complete else str(last)
    return "left" if plan.events is not None else f"ended with {last}"


def run_sync(url: str, plans: list[Plan]) -> Counter[str]:
    def run(plan: Plan) -> str:
        last: object = None
        with client.stream(plan.prompt, max_tokens=plan.max_tokens, ignore_eos=True) as stream:
            if plan.events == 0:
                time.sleep(plan.pause)
                return "left"
            for number, event in enumerate(stream, 1):
                last = event
                if number == plan.events:
                    break
        return outcome(plan, last)

    with OrcaClient(url, retries=0) as client, ThreadPoolExecutor(AT_ONCE // 2) as pool:
        return Counter(pool.map(run, plans))


def run_async(url: str, plans: list[Plan]) -> Counter[str]:
    async def run(client: AsyncOrcaClient, plan: Plan, turn: asyncio.Semaphore) -> str:
        last: object = None
        async with turn, client.stream(plan.prompt, max_tokens=plan.max_tokens, ignore_eos=True) as stream:
            if plan.events == 0:
                await asyncio.sleep(plan.pause)
                return "left"
            number = 0
            async for event in stream:
                last = event
                number += 1
                if number == plan.events:
                    break
        return outcome(plan, last)

    async def main() -> Counter[str]:
        turn = asyncio.Semaphore(AT_ONCE // 2)
        async with AsyncOrcaClient(url, retries=0) as client:
            return Counter(await asyncio.gather(*(run(client, plan, turn) for plan in plans)))

    return asyncio.run(main())


def a_round(server: TritonServer, seed: int) -> None:
    """500 requests, 167 of them left: 60 by processes that are killed, the others half and half by both clients."""
    command = [sys.executable, str(DESERTER), server.grpc_url, str(STREAMS)]
    deserters = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(DESERTERS)]
    try:
        with ThreadPoolExecutor(2) as pool:
            sync = pool.submit(run_sync, server.grpc_url, plans(220, 53, seed))
            aio = pool.submit(run_async, server.grpc_url, plans(220, 54, seed + 1))
            for deserter in deserters:
                assert deserter.stdout is not None
                assert deserter.stdout.readline() == b"holding\n"
                deserter.kill()
            outcomes = sync.result() + aio.result()
    finally:
        for deserter in deserters:
            deserter.kill()
            deserter.communicate()
    assert set(outcomes) == {"left", "served"}, outcomes
    assert outcomes["served"] >= 500 - 167, outcomes


def memory(server: TritonServer) -> dict[str, int]:
    """Bytes resident in the stub and in the engine."""
    (stub,), (engine,) = server.stub_pids, server.engine_pids
    return {name: psutil.Process(pid).memory_info().rss for name, pid in (("stub", stub), ("engine", engine))}


def test_500_requests_a_third_of_them_left(server: TritonServer) -> None:
    for seed in (0, 2):
        a_round(server, seed)
        wait_until_idle(server)
    before = memory(server)
    failures = metric(server, "orca_failures_total", reason="CANCELLED")
    processes = server.stub_pids, server.engine_pids

    a_round(server, seed=4)
    wait_until_idle(server)
    assert metric(server, "orca_kv_slots", state="reserved") == 0
    assert metric(server, "orca_kv_slots", state="used") == 0
    assert metric(server, "orca_failures_total", reason="CANCELLED") > failures  # how many depends on who is faster
    growth = {name: size - before[name] for name, size in memory(server).items()}
    assert max(growth.values()) < GROWTH, growth
    assert (server.stub_pids, server.engine_pids) == processes
    assert post(server, {"text_input": "a", "max_tokens": 1})[0] == 200


def test_50_curls_that_are_killed(server: TritonServer) -> None:
    """A dead HTTP client has crashed servers before."""
    url = f"{server.http_url}/v2/models/orca/generate_stream"
    body = '{"text_input": "Hold this", "stream": true, "max_tokens": 300, "ignore_eos": true}'
    for _ in range(50):
        curl = subprocess.Popen(["curl", "-sN", url, "-d", body], stdout=subprocess.PIPE)
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith(b"data: ")
        curl.kill()
        curl.communicate()
    wait_until_idle(server)
    assert post(server, {"text_input": "a", "max_tokens": 1})[0] == 200
