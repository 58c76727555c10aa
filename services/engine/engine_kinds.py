"""Kinds of an engine's tensors, which its process moves between tiers."""

from __future__ import annotations

from functools import partial

from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.mesh.instances.kind_controller import KindController, TensorsOfKind
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import TensorKind
from meshrl.services.engine.kv.cache_retention import prefers_recomputation
from meshrl.services.engine.stepping.commands import StepCommands
from meshrl.services.engine.weights.engine_weights import EngineWeights

PARAMETERS, KV_CACHE = TensorKind.PARAMETERS, TensorKind.KV_CACHE
ENGINE_KINDS = (PARAMETERS, KV_CACHE)
# kinds that a function computes with, and those that it changes
SLICE_KINDS = {
    "generate": (ENGINE_KINDS, (KV_CACHE,)),
    "sync": (ENGINE_KINDS, ENGINE_KINDS),
}


class EngineKinds:
    """Kinds `parameters` and `kv_cache` of one engine; without weights they have no bytes."""

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        weights: EngineWeights,
        commands: StepCommands,
        time_slices: SliceClient | None,
    ) -> None:
        self._engine, self._weights, self._commands = engine, weights, commands
        parameters = TensorsOfKind(
            engine.collect_weights,
            self._measure_weights,
            self._rebuild_weights,
            lambda: engine.cannot_copy_memory,
        )
        cache = TensorsOfKind(
            engine.collect_cache, self._measure_cache, self._rebuild_cache, self._prefers_drop
        )
        self.controller = KindController(
            mesh,
            {PARAMETERS: parameters, KV_CACHE: cache},
            partial(
                commands.run_between_steps, what="a move of the engine's tensors", is_first=True
            ),
            *mesh.settings.offload_targets,
            is_time_sliced=lambda: time_slices is not None and time_slices.is_enabled,
        )

    def _has_weights(self) -> bool:
        weights = self._weights
        return not weights.is_asleep and (self._engine.version >= 0 or weights.loaded_bytes > 0)

    def _measure_weights(self) -> int:
        return self._weights.loaded_bytes if self._has_weights() else 0

    def _measure_cache(self) -> int:
        return self._engine.cache_size_bytes if self._has_weights() else 0

    def _prefers_drop(self) -> bool:
        engine = self._engine
        if engine.cannot_copy_memory:
            return True
        tokens = engine.running_cache_tokens
        copy_s = self.controller.measure_copy_s(KV_CACHE, tokens * engine.cache_bytes_per_token)
        return prefers_recomputation(copy_s, tokens, engine.prefill_tokens_per_s)

    async def _rebuild_weights(self, memory: ReleasableMemory) -> None:
        """Allocate the memory; the current version is fetched before the next step, unless the
        engine has kept it.
        """
        await self.controller.reallocate(memory)
        if self._engine.keeps_weights:
            return
        await self._commands.run_between_steps(
            self._engine.quarantine, "the loss of the engine's weights", is_first=True
        )
        self._weights.forget_version()

    async def _rebuild_cache(self, memory: ReleasableMemory) -> None:
        """Allocate the memory; running requests compute their cache again."""
        await self.controller.reallocate(memory)
        await self._commands.run_between_steps(
            self._engine.forget_cache, "the loss of the engine's cache", is_first=True
        )
