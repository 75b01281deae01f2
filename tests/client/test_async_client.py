from __future__ import annotations

import asyncio
import socket
import time

import pytest
from mock_prompts import MODEL, endless, script

from orca_client import AsyncOrcaClient, Cancelled, DeadlineExceeded, Finished, NotFound, TextDelta, Unavailable


@pytest.fixture
def run(server):
    """Run a test's coroutine function with a client, in a fresh event loop."""

    def run(test, **options):
        async def main():
            async with AsyncOrcaClient(server.grpc_url, **options) as client:
                return await asyncio.wait_for(test(client), 60)

        return asyncio.run(main())

    return run


def test_stream_gives_each_token_as_it_comes_then_the_totals(run):
    async def test(client):
        stream = client.stream(script("Hello", " wörld", " 聪", delay=0.5), model=MODEL)
        first = await anext(stream)
        start = time.monotonic()
        rest = [event async for event in stream]
        assert time.monotonic() - start > 0.5, "the first token must not wait for the last"
        return [first, *rest]

    assert run(test) == [
        TextDelta("Hello", 1),
        TextDelta(" wörld", 1),
        TextDelta(" 聪", 1),
        Finished("length", 7, 3),
    ]


def test_generate_and_chat(run, report):
    async def test(client):
        whole = await client.generate(script("a", "b"), model=MODEL, temperature=0.0, timeout=9, request_id="async")
        chat = await client.chat([{"role": "user", "content": script("c")}], model=MODEL)
        streamed = [e async for e in client.stream_chat([{"role": "user", "content": script("d")}], model=MODEL)]
        return whole.text, whole.num_output_tokens, chat.text, streamed

    assert run(test) == ("ab", 2, "c", [TextDelta("d", 1), Finished("length", 7, 1)])
    seen = report("async")
    assert seen["inputs"]["sampling_parameters"] == '{"temperature": 0.0}'
    assert 8_500_000 < seen["timeout_us"] <= 9_000_000


async def leave_the_loop(stream):
    async for _ in stream:
        break


async def leave_the_block(stream):
    async with stream:
        await anext(stream)


async def aclose(stream):
    await anext(stream)
    await stream.aclose()
    assert [event async for event in stream] == []


async def cancel_the_task(stream):
    async def read():
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leave_the_loop, leave_the_block, aclose, cancel_the_task])
def test_leaving_cancels_on_the_server(run, sees_cancel, leave):
    request_id = f"async {leave.__name__}"

    async def test(client):
        await leave(client.stream(endless(), model=MODEL, request_id=request_id))
        # The client lives on: it is the request that ended.
        return await asyncio.to_thread(sees_cancel, request_id)

    assert run(test)


def test_cancelling_a_task_that_generates_cancels_on_the_server(run, sees_cancel):
    async def test(client):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.generate(endless(), model=MODEL, request_id="async task"), 0.2)
        return await asyncio.to_thread(sees_cancel, "async task")

    assert run(test)


def test_closing_the_client_ends_its_streams(run, sees_cancel):
    async def test(client):
        stream = client.stream(script("a", hang_at=0), model=MODEL, request_id="async orphan")
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.2)
        await client.aclose()
        with pytest.raises(Cancelled):
            await reader

    run(test)
    assert sees_cancel("async orphan")


async def rest(stream):
    return [event async for event in stream]


@pytest.mark.parametrize("wait", [0.001, 0.2])
def test_an_answer_cut_by_a_cancelled_wait_is_not_taken_for_a_whole_one(run, wait):
    request_id = f"async cut {wait}"

    async def test(client):
        # No token comes within the wait.
        stream = client.stream(script("a", "b", delay=0.5), model=MODEL, request_id=request_id)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), wait)
        with pytest.raises(Cancelled) as caught:
            await rest(stream)
        assert caught.value.request_id == request_id
        assert await rest(stream) == [], "the end is told once"

    run(test)


def test_a_wait_that_is_cancelled_between_two_tries_cuts_the_answer(run, monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: 5)

    async def test(client):
        stream = client.stream(script("a", fail_at=0, times=1, message="[UNAVAILABLE] full"), model=MODEL)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.5)
        with pytest.raises(Cancelled):
            await rest(stream)

    run(test)


def test_closing_the_client_cuts_an_answer_that_nobody_waits_for(run):
    async def test(client):
        stream = client.stream(endless(), model=MODEL)
        await anext(stream)
        await client.aclose()
        with pytest.raises(Cancelled):
            await rest(stream)

    run(test)


def test_a_closed_client_says_so(run):
    async def test(client):
        assert await client.server_ready(float("inf"))
        await client.aclose()
        with pytest.raises(Cancelled, match="the client is closed"):
            client.stream(script("a"), model=MODEL)
        with pytest.raises(Cancelled, match="the client is closed"):
            await client.generate(script("a"), model=MODEL)
        return await client.server_ready(), await client.model_ready(MODEL)

    assert run(test) == (False, False)


def test_closing_the_client_answers_who_asks_whether_the_server_is_ready():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = AsyncOrcaClient(f"127.0.0.1:{silent.getsockname()[1]}")
            asking = asyncio.create_task(client.server_ready(10))
            await asyncio.sleep(0.1)
            await client.aclose()
            return await asyncio.wait_for(asking, 5)

    assert asyncio.run(main()) is False


@pytest.mark.parametrize("timeout", [float("inf"), 1e13])
def test_a_timeout_may_be_as_long_as_one_likes(run, timeout):
    async def test(client):
        ready = await client.model_ready(MODEL, timeout)
        return ready, (await client.generate(script("a"), model=MODEL, timeout=timeout)).text

    assert run(test) == (True, "a")


def test_deadline_ends_a_silent_request_on_both_sides(run, sees_cancel):
    async def test(client):
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.generate(script("a", hang_at=0), model=MODEL, timeout=0.3, request_id="async late")
        assert 0.3 <= time.monotonic() - start < 20

    run(test)
    assert sees_cancel("async late")


def test_retries_before_the_first_token_and_never_after_it(run, report):
    async def test(client):
        prompt = script("a", "b", fail_at=0, times=2, message="[UNAVAILABLE] the engine restarts")
        assert len([e async for e in client.stream(prompt, model=MODEL, request_id="async retried")]) == 3
        prompt = script("a", "b", fail_at=1, times=1, message="[UNAVAILABLE] the engine restarts")
        stream = client.stream(prompt, model=MODEL, request_id="async seen")
        assert await anext(stream) == TextDelta("a", 1)
        with pytest.raises(Unavailable, match="the engine restarts"):
            await anext(stream)
        assert [e async for e in stream] == []

    run(test)
    assert report("async retried")["tries"] == 3
    assert report("async seen")["tries"] == 1


def test_many_streams_at_once(run):
    async def answer(client, number):
        prompt = script(*[f"{number}.{i} " for i in range(20)], delay=0.01)
        return "".join([e.text async for e in client.stream(prompt, model=MODEL) if isinstance(e, TextDelta)])

    async def test(client):
        return await asyncio.gather(*(answer(client, number) for number in range(64)))

    assert run(test) == ["".join(f"{n}.{i} " for i in range(20)) for n in range(64)]


def test_readiness_and_unknown_model(run):
    async def test(client):
        with pytest.raises(NotFound, match="no-such-model"):
            await client.generate("x", model="no-such-model")
        return await client.server_ready(), await client.model_ready(MODEL), await client.model_ready("no-such-model")

    assert run(test) == (True, True, False)


def test_no_server():
    async def main():
        async with AsyncOrcaClient("127.0.0.1:1", retries=1) as client:
            with pytest.raises(Unavailable):
                await client.generate("x")
            return await client.server_ready()

    assert asyncio.run(main()) is False
