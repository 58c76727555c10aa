"""The weights that an engine has, and how others take their place, or none, between
two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from meshrl.common.api.node import TURN_S
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.generation.contract import NO_VERSION, Quarantined, TokenEngine, replacing
from meshrl.common.mesh.residents.tiers import Keep, Take
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.files.storages import trim
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.layout.images import outline
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.measurement.pauses import Pauses
from meshrl.services.engine.stepping.commands import BETWEEN_S, StepCommands
from meshrl.services.engine.stepping.shards import Shards

WEIGHTS_S = 600.0  # for the current version to be fetched and loaded


@dataclass(frozen=True)
class AdapterVersion:
    """A version of a job's adapters, and the weights that they are added to."""

    name: str  # by which requests ask for them
    version: int
    tensors: Mapping[str, Tensor]
    scale: float
    base: str  # manifest of the weights that they are added to
    base_version: int
    model: Mapping[str, Tensor] | None  # these weights; None: the engine has them


class EngineWeights:
    """Those of its job's version. They are put in place whole: an engine that fails on the way has
    none, and shards hear so.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        commands: StepCommands,
        shards: Shards,
        pauses: Pauses,
        turns: Turns | None,
    ) -> None:
        self._mesh, self._engine, self._commands = mesh, engine, commands
        self._shards, self._pauses, self._turns = shards, pauses, turns
        self.manifest = ""  # names the weights that are loaded
        self.lineage = 0  # lineage of their version; never ahead of them
        self.base = ""  # manifest of those that the job's adapters lie beside; empty: of none
        self.bytes = 0  # of what was loaded last, as it came
        self.began = mesh.clock.monotonic()  # when its process did
        self.start_s = 0.0  # from then until it first had weights; 0: it has had none
        self._model_bytes = 0  # the part of them that is no adapter's
        self.woken = False  # the engine was, and has none yet
        self.asleep = False  # by request: new versions are not fetched until it wakes
        self.loaded = asyncio.Event()  # some were, since it was woken
        self.changed = asyncio.Event()  # the job may have others, or it may sleep no more
        # As the driver's side knows them:
        self.adapter = ""  # of its job, for requests that name none
        self.computing = ""  # the manifest of what it computes with
        self.kv: HostCache | None = None  # which knows what was computed with which

    @property
    def version(self) -> int:
        """The job's version that it computes with; NO_VERSION: with none that is whole."""
        if not self.adapter or self._engine.version < 0:
            return self._engine.version
        return self._engine.adapters.get(self.adapter, NO_VERSION)

    @property
    def told(self) -> tuple[int, int]:
        return self.lineage, self.version

    def has_base(self, manifest: str) -> bool:
        return self.base == manifest and self._engine.version >= 0 and not self.woken

    async def swap(
        self, tensors: Mapping[str, Tensor], version: int, manifest: str, lineage: int = 0
    ) -> None:
        """Puts a version's weights in place between two steps; an engine without any wakes. One
        that sleeps by now is left alone.
        """
        others = self._shards.out if self.base else []

        def put() -> None:
            if not self.adapter:
                return self._put_model(tensors, version)
            self._engine.abort(others)
            self._put_model(tensors, version)
            with replacing(version, self._engine.quarantine):
                self._engine.unload_adapter(self.adapter)
            self.adapter = ""

        if await self._applied(put, manifest):
            self.base, self._model_bytes = "", _bytes(tensors)
            self._entered(manifest, lineage, self._model_bytes)

    async def put_adapter(self, adapter: AdapterVersion, manifest: str, lineage: int) -> None:
        """Puts a version of the job's adapters in place beside their base, and before it the base
        where the engine has it not: see `has_base`. What is under way with other weights than the
        base's ends as aborted, and is asked for again.
        """
        others = [] if self.base else self._shards.out

        def load() -> None:
            about = adapter.tensors, adapter.scale, adapter.version
            self._engine.load_adapter(adapter.name, *about)
            self.adapter = adapter.name

        def put() -> None:
            if adapter.model is None:
                return load()
            self._engine.abort(others)
            self._put_model(adapter.model, adapter.base_version)
            with replacing(adapter.version, self._engine.quarantine):  # else the bare base serves
                load()

        if await self._applied(put, manifest):
            if adapter.model is not None:
                self.base, self._model_bytes = adapter.base, _bytes(adapter.model)
            self._entered(manifest, lineage, self._model_bytes + _bytes(adapter.tensors))

    def enter(self, lineage: int) -> None:
        """The weights that are loaded are of this lineage: shards hear of them."""
        self.lineage = lineage
        self._shards.tell_weights()

    def _put_model(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if self._engine.version < 0 or self.woken:
            self._engine.wake(tensors, version)
            self.woken = False
        else:
            self._engine.swap(tensors, version)

    async def _applied(self, apply: Callable[[], None], manifest: str) -> bool:
        """Has new weights put in place between two steps; False: the engine sleeps by now."""

        def put() -> bool:
            if self.asleep:
                return False
            try:
                with self._pauses.applying():
                    apply()
            except Quarantined:
                self._computes_with("")
                self._commands.deliver(self._quarantined)
                raise
            self._computes_with(manifest)
            return True

        alone = self._turns is None or not self._turns.enabled
        within_s = BETWEEN_S if alone else TURN_S
        what = "the engine to take new weights"
        return await self._commands.between_steps(put, what, within_s, needs_turn=True)

    def _computes_with(self, manifest: str) -> None:
        self.computing = manifest
        if self.kv is not None:
            self.kv.computing(manifest, list(self._engine.adapters))

    def _entered(self, manifest: str, lineage: int, weight_bytes: int) -> None:
        self.manifest, self.bytes = manifest, weight_bytes
        self.start_s = self.start_s or self._mesh.clock.monotonic() - self.began
        self.loaded.set()
        self.enter(lineage)

    def _quarantined(self) -> None:
        """Nobody knows what it holds: `follow` asks for a whole version again, and shards hear that
        it has none.
        """
        self.manifest = ""
        self._mesh.telemetry.count("engine_quarantined")
        self._shards.tell_weights()


class EngineSleeper:
    """Puts an engine to sleep between two steps: weights and cache are given back, what runs waits
    and loses no token. The store has the weights; what was computed of sessions is computed again.
    `cache_tokens`: that its cache has room for.
    """

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
        return True

    async def uncover(self) -> None:
        """It has never stopped."""

    async def cover(self) -> None:
        """The store has all that it needs; what runs is run elsewhere when it drains."""


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in outline(tensors).values())
