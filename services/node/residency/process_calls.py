"""Calls of role processes that end when the process exits.

A call by name would wait for the next process of that name, which starts only when others have made
room for it: perhaps those that wait for the call.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call
from meshrl.common.base.errors import PeerLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception

R = TypeVar("R")


class ProcessCalls:
    """Calls in progress by instance."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._exits: dict[str, set[asyncio.Future[None]]] = defaultdict(set)

    async def call(
        self,
        instance: str,
        name: str,
        method: Call[Any, R],
        request: object,
        deadline_s: float | None = None,
    ) -> R:
        """Call the process of an instance; raise PeerLost if it exits before it answers."""
        exit = asyncio.get_running_loop().create_future()
        self._exits[instance].add(exit)
        call = asyncio.create_task(
            self._mesh.ref(name).call(method, request, deadline_s=deadline_s), name=method.label
        )
        call.add_done_callback(consume_exception)
        try:
            await asyncio.wait([call, exit], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
        finally:
            self._exits[instance].discard(exit)
            call.cancel()
        raise PeerLost(f"{method.label}: the process has exited", where=name)

    def end(self, instance: str) -> None:
        """End the calls of an instance whose process has exited."""
        for exit in self._exits.pop(instance, ()):
            exit.set_result(None)
