"""How an engine sleeps: weights and cache are given back, what runs waits and loses no token.

Nothing is kept: the store has the weights, and what was computed of sessions is computed again.
"""

from __future__ import annotations

import asyncio

from common.base.errors import DeadlineExceeded, Refused
from common.generation.contract import TokenEngine
from common.mesh.residents.tiers import Keep, Take
from common.mesh.runtime.mesh import Mesh
from common.model.files.storages import trim
from common.state.pool.workers.rows import Tier
from services.engine.stepping.commands import StepCommands
from services.engine.weights.loaded import EngineWeights

WEIGHTS_S = 600.0  # for the current version to be fetched and loaded


class EngineSleeper:
    """Puts an engine to sleep between two steps. `cache_tokens`: that its cache has room for."""

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        commands: StepCommands,
        weights: EngineWeights,
        cache_tokens: int,
    ) -> None:
        self._mesh, self._engine, self._commands = mesh, engine, commands
        self._weights, self._cache_tokens = weights, cache_tokens

    @property
    def bytes(self) -> int:
        """Of its weights, and of the room for its cache."""
        weights = self._weights
        if weights.asleep or (self._engine.version < 0 and not weights.bytes):
            return 0
        return weights.bytes + self._cache_tokens * self._engine.cache_bytes_per_token

    async def sleep(self, keep: Keep) -> None:
        """Rests until `wake`; new versions are not fetched meanwhile."""

        def rest() -> None:
            self._engine.sleep()
            self._engine.pause()

        self._weights.asleep = True  # `follow` loads nothing from now on
        try:
            await self._commands.between_steps(rest, "the engine to sleep")
        except BaseException:
            self._weights.asleep = False
            raise
        self._weights.manifest = ""
        await self._mesh.host.run_blocking(trim, deadline_s=WEIGHTS_S)

    async def wake(self, take: Take) -> None:
        """Has `follow` load the current version. Refused, and it sleeps on, if it cannot be had."""
        weights, engine = self._weights, self._engine
        had_weights = engine.version >= 0
        weights.loaded.clear()
        weights.woken, weights.asleep = had_weights, False
        await self._commands.between_steps(engine.resume, "the engine to wake")
        weights.changed.set()
        if not had_weights:
            return
        try:
            async with self._mesh.clock.timeout(WEIGHTS_S, "the weights to be loaded"):
                await weights.loaded.wait()
        except DeadlineExceeded as error:
            weights.asleep = True
            await self._commands.between_steps(engine.pause, "the engine to sleep on")
            raise Refused(str(error), where=self._mesh.name, fix="ask again") from error
        except asyncio.CancelledError:
            weights.asleep = True
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
