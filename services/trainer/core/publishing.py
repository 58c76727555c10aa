"""Publishes weight versions to the store."""

from __future__ import annotations

from torch import Tensor

from common.api.weights import Fetch, Weights
from common.job.job_data import JobData
from common.model.lora import is_adapter
from common.model.transfer import stage, stage_again
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.wire.bulk import BulkClient
from common.wire.weight_store import STORE


class Publisher:
    """Writes versions to the store. A job that trains adapters publishes only these after version
    0.
    """

    def __init__(self, mesh: Mesh, bulk: BulkClient, data: JobData) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data

    async def stage(
        self, lineage: int, version: int, weights: dict[str, Tensor], before: str
    ) -> str:
        """Makes a version durable and returns its manifest's digest; `before` is that of another
        version of the same base, or empty.
        """
        base = None
        if before and self._data.config.lora.rank:
            store = self._mesh.ref(STORE)
            base = await patiently(
                self._mesh.clock, lambda: store.call(Weights.manifest, Fetch(before))
            )
            weights = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
        return await stage(self._mesh, self._bulk, self._data.id, lineage, version, weights, base)

    async def stage_again(
        self, lineage: int, version: int, weights: dict[str, Tensor], manifest: str
    ) -> bool:
        """Writes a version that the store has not whole any more; False when these are not its
        weights.
        """
        about = self._data.id, lineage, version, weights, manifest
        return await stage_again(self._mesh, self._bulk, *about)
