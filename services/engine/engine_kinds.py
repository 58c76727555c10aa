"""Kinds of an engine's tensors, which its process moves between tiers."""

from __future__ import annotations

from meshrl.common.base.errors import Refused
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.mesh.instances.kind_controller import KindMemory, TensorsOfKind
from meshrl.common.state.pool.workers.rows import TensorKind
from meshrl.services.engine.weights.engine_weights import EngineWeights


def make_engine_kinds(engine: TokenEngine, weights: EngineWeights) -> dict[str, TensorsOfKind]:
    """Return the sources of an engine's kinds; without weights they have no bytes."""

    def has_weights() -> bool:
        return not weights.is_asleep and (engine.version >= 0 or weights.loaded_bytes > 0)

    def measure_weights() -> int:
        return weights.loaded_bytes if has_weights() else 0

    def measure_cache() -> int:
        return engine.cache_tokens * engine.cache_bytes_per_token if has_weights() else 0

    def collect() -> KindMemory:
        raise Refused("the engine's tensors move as a whole", where="engine")

    return {
        TensorKind.PARAMETERS: TensorsOfKind(collect, measure_weights),
        TensorKind.KV_CACHE: TensorsOfKind(collect, measure_cache),
    }
