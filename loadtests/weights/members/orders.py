"""Orders to a process of a load test over its channel, one after the other.

An order is a JSON object with the name of a method and its arguments; the answer is a JSON object,
too.
"""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from typing import Any

from meshrl.common.mesh.process.entry.child import ChildChannel


async def obey(member: object) -> None:
    """Call `member.order(...)` for each order until the other end closes; answer errors as such."""
    channel, loop = ChildChannel.from_env(), asyncio.get_running_loop()
    orders: asyncio.Queue[bytes | None] = asyncio.Queue()

    def hear() -> None:
        frame: bytes | None = b""
        while frame is not None:
            try:
                frame = channel.recv()
            except OSError:
                frame = None
            loop.call_soon_threadsafe(orders.put_nowait, frame)

    threading.Thread(target=hear, name="orders", daemon=True).start()
    channel.send(b"{}")  # it is there
    while (frame := await orders.get()) is not None:
        document = json.loads(frame)
        channel.send(json.dumps(await _answer(member, document.pop("order"), document)).encode())


async def _answer(member: object, order: str, words: dict[str, Any]) -> Any:
    try:
        found = getattr(member, order)(**words)
        return {"answer": await found if asyncio.iscoroutine(found) else found}
    except Exception as error:
        code = getattr(error, "code", type(error).__name__)
        return {"error": str(error), "code": code, "trace": traceback.format_exc()[-2000:]}
