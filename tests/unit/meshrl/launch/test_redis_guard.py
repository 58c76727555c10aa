"""The watch over the mesh's own Redis ends when it is told to."""

from __future__ import annotations

import asyncio

from meshrl.launch.redis.guard import answers
from tests.load import scaled


class Ponging:
    """A server that answers every command with PONG, and says when one has come."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(1 << 16):
            self.heard.set()
            writer.write(b"+PONG\r\n" * block.count(b"*"))
            await writer.drain()
        writer.close()


async def test_a_cancellation_ends_it_at_whatever_moment_it_comes() -> None:
    server = Ponging()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]

    async def watch() -> None:
        while True:
            await answers(f"redis://127.0.0.1:{port}/0")

    async with listening:
        for turns in range(120):  # of the loop, before the cancellation
            task = asyncio.create_task(watch())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=scaled(10.0))
            assert done, f"cancelled after {turns} turns of the loop, and it goes on"
            assert task.cancelled()
        assert server.heard.is_set()
