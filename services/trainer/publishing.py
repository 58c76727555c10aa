"""Weights on their way out: versions into the store, checkpoints as directories for other tools."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from common.api.weights import Fetch, Weights
from common.bulk import BulkClient
from common.jobdata import JobData
from common.mesh import Mesh
from common.model.config import ModelConfig
from common.model.hf import save_model
from common.model.lora import is_adapter, merged, save_adapter
from common.model.transfer import stage
from common.patience import patiently
from common.store import STORE

ADAPTER = "adapter"  # below a checkpoint's directory, in PEFT's layout


class Publisher:
    """Of a job that trains adapters, only these go out after version 0."""

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


def write_model(
    directory: Path, config: ModelConfig, weights: dict[str, Tensor], data: JobData
) -> None:
    """A directory that `transformers` reads; adapters are merged, and lie beside it for PEFT."""
    lora = data.config.lora
    plain = merged(config, weights, lora.scale) if lora.rank else weights
    save_model(directory, config, plain, data.tokenizer)
    if lora.rank:
        base = data.config.model.path or data.config.name
        save_adapter(directory / ADAPTER, config, weights, lora.alpha, base)
