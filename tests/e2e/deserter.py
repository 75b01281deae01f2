"""A client process that opens streams, says so, and holds them until it is killed: `deserter.py URL STREAMS`."""

from __future__ import annotations

import asyncio
import sys

from orca_client import AsyncOrcaClient


async def main(url: str, count: int) -> None:
    async with AsyncOrcaClient(url, retries=0) as client:
        streams = [client.stream("Hold this " * (i % 10 + 1), max_tokens=350, ignore_eos=True) for i in range(count)]
        reads = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        print("holding", flush=True)
        await asyncio.sleep(3600)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
