"""How an engine sleeps: weights and cache are given back, what runs waits and loses no token.

Nothing is kept: the store has the weights, and what was computed of sessions is computed again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import DeadlineExceeded, Refused
from common.model.storages import trim
from common.pool.rows import Tier
from common.runtime.residents.tiers import Keep, Take

if TYPE_CHECKING:
    from services.engine.service import EngineService

WEIGHTS_S = 600.0  # for the current version to be fetched and loaded


class EngineSleeper:
    """Puts an engine to sleep between two steps. `cache_tokens`: that its cache has room for."""

    def __init__(self, service: EngineService, cache_tokens: int) -> None:
        self._service, self._cache_tokens = service, cache_tokens

    @property
    def bytes(self) -> int:
        """Of its weights, and of the room for its cache."""
        service = self._service
        if service.asleep or (service.engine.version < 0 and not service.weight_bytes):
            return 0
        return service.weight_bytes + self._cache_tokens * service.engine.cache_bytes_per_token

    async def sleep(self, keep: Keep) -> None:
        """Rests until `wake`; new versions are not fetched meanwhile."""
        service, engine = self._service, self._service.engine

        def rest() -> None:
            engine.sleep()
            engine.pause()

        service.asleep = True  # `follow` loads nothing from now on
        try:
            await service.between_steps(rest, "the engine to sleep")
        except BaseException:
            service.asleep = False
            raise
        service.manifest = ""
        await service.mesh.host.run_blocking(trim, deadline_s=WEIGHTS_S)

    async def wake(self, take: Take) -> None:
        """Has `follow` load the current version. Refused, and it sleeps on, if it cannot be had."""
        service, engine = self._service, self._service.engine
        had_weights = engine.version >= 0
        service.loaded.clear()
        service.woken, service.asleep = had_weights, False
        await service.between_steps(engine.resume, "the engine to wake")
        service.changed.set()
        if not had_weights:
            return
        try:
            async with service.mesh.clock.timeout(WEIGHTS_S, "the weights to be loaded"):
                await service.loaded.wait()
        except DeadlineExceeded as error:
            service.asleep = True
            await service.between_steps(engine.pause, "the engine to sleep on")
            raise Refused(str(error), where=service.mesh.name, fix="ask again") from error
        except asyncio.CancelledError:
            service.asleep = True
            raise

    async def move(self, tier: Tier) -> None:
        """Nothing is kept."""

    @property
    def covered(self) -> bool:
        """The store has all that it needs."""
        return True

    async def uncover(self) -> None:
        """It has never stopped."""

    async def cover(self) -> None:
        """The store has all that it needs; what runs is run elsewhere when it drains."""
