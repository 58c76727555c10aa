"""Sends samples to where their run is at home, from a shard that does not see it."""

from __future__ import annotations

import asyncio
from collections import deque

from common.api.weights import KeepSamples, Weights
from common.errors import MeshError
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.wire.weight_store import STORE

MOST_BYTES = 8 << 20  # that wait while the store is away; what comes then is left out
BATCH_BYTES = 256 << 10  # of a message
LAST_S = 5.0  # for what waits when the shard ends


class SampleSender:
    """One batch is on its way at a time, so that lines arrive in order."""

    def __init__(self, mesh: Mesh, job: str, shard: int) -> None:
        self._mesh, self._job, self._shard = mesh, job, shard
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._sending: asyncio.Task[None] | None = None

    def write(self, line: bytes) -> None:
        """Hands a line over."""
        if self._bytes + len(line) > MOST_BYTES:
            self._mesh.telemetry.log.warning("a sample is not kept", error="the store is away")
            return
        self._waiting.append(line)
        self._bytes += len(line)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="samples")

    async def close(self) -> None:
        """Sends what waits, within LAST_S."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=LAST_S)
            self._sending.cancel()

    async def _send(self) -> None:
        store = self._mesh.ref(STORE)
        while self._waiting:
            lines = [self._waiting.popleft()]
            while self._waiting and sum(map(len, lines)) < BATCH_BYTES:
                lines.append(self._waiting.popleft())
            text = b"".join(lines).decode("utf-8", "replace")
            request = KeepSamples(self._job, self._shard, self._mesh.random.token(8), text)
            try:
                await patiently(
                    self._mesh.clock,
                    lambda request=request: store.call(Weights.keep_samples, request),  # type: ignore[misc]
                )
            except MeshError as error:
                self._mesh.telemetry.log.warning("a sample is not kept", error=str(error))
            self._bytes -= sum(map(len, lines))
