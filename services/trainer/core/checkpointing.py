"""Writes checkpoints of a run while training goes on: a directory that `transformers` reads, with
what the next step depends on beside it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from common.api.weights import Checkpoint, Weights
from common.errors import MeshError
from common.job.job_data import JobData
from common.model.config import ModelConfig
from common.model.output import write_version
from common.records import damage
from common.records.checkpoints import STATE, appear, checkpoint_name, newest_due, set_aside
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.state import events
from common.wire.weight_store import STORE
from services.trainer.ranks.compute import SAVE_S, Compute


class Checkpoints:
    """One is written at a time; `name` and `step` are of the last that is durable."""

    def __init__(
        self,
        mesh: Mesh,
        data: JobData,
        compute: Compute,
        config: ModelConfig,
        enter: Callable[[str, int], None],
    ) -> None:
        self._mesh, self._data, self._compute, self._config = mesh, data, compute, config
        self._enter = enter
        self.name, self.step = "", -1
        self.pause_s = 0.0  # seconds that training stood still for the last checkpoint
        self._writing: asyncio.Task[None] | None = None

    def due(self, step: int) -> bool:
        config = self._data.config
        return newest_due(step, config.training.checkpoint_every, config.budget.steps) == step

    async def clear(self, committed: str) -> None:
        """Removes what an earlier start of the trainer began and did not end, not the checkpoint
        that is committed: if its manifest is gone, it is damaged. So is an older one without its
        manifest, which is set aside.
        """
        directory, run = self._data.run_dir / "checkpoints", self._mesh.host.run_blocking
        state = self._mesh.state
        gone = await run(_remove_unnamed, directory, committed, deadline_s=SAVE_S)
        for path, aside in gone:
            then = "what is left of it is set aside; the other kept ones are there"
            told = damage.fields(
                "checkpoint", path, "it is missing", then, job=self._data.id, aside=aside
            )
            await patiently(self._mesh.clock, partial(events.append, state, damage.EVENT, told))

    async def begin(
        self,
        lineage: int,
        step: int,
        manifest: str,
        weights: dict[str, Tensor],
        account: dict[str, Any],
    ) -> None:
        """Copies what must be kept and goes on writing it; waits for the one before."""
        began = self._mesh.clock.monotonic()
        await self.settled()
        snapshot = await self._compute.snapshot()
        self.pause_s = self._mesh.clock.monotonic() - began
        request = Checkpoint(
            job=self._data.id,
            lineage=lineage,
            step=step,
            weights=manifest,
            account=account | {"ranks": self._compute.ranks},
            files={},
        )
        self._writing = asyncio.create_task(self._write(request, snapshot, weights))

    async def settled(self, *, required: bool = False) -> None:
        """Returns when nothing is being written. What could not be written is tried again with the
        next checkpoint, unless it is `required`.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            async with self._mesh.clock.timeout(SAVE_S, "a checkpoint"):
                await writing
        except (MeshError, OSError) as error:
            if required:
                raise
            self._mesh.telemetry.log.error("checkpoint", error=str(error))

    async def _write(self, request: Checkpoint, snapshot: Any, weights: dict[str, Tensor]) -> None:
        name = checkpoint_name(request.lineage, request.step, request.weights)
        directory = self._data.run_dir / "checkpoints" / name
        # Whoever else writes it, a trainer that was replaced and wakes, writes the same elsewhere.
        scratch = directory.with_name(f"{name}.{self._mesh.incarnation}")
        run = self._mesh.host.run_blocking
        try:
            await self._compute.write(snapshot, scratch / STATE)
            self._enter("writing", request.step)
            arguments = self._data, self._config, weights, scratch, directory
            await run(write_version, *arguments, deadline_s=SAVE_S)
            files = await run(appear, scratch, directory, deadline_s=SAVE_S)
        finally:
            await run(shutil.rmtree, scratch, True, deadline_s=SAVE_S)
        store = self._mesh.ref(STORE)
        whole = replace(request, files=files)
        await patiently(self._mesh.clock, lambda: store.call(Weights.save, whole))
        self.name, self.step = name, request.step


def _remove_unnamed(directory: Path, committed: str) -> list[tuple[Path, Path]]:
    """The manifests that are missing, and where what was left of their checkpoints lies now."""
    aside = []
    for path in sorted(directory.glob("step-*")):
        manifest = path.with_name(f"{path.name}.json")
        if not path.is_dir() or path.name == committed or manifest.is_file():
            continue
        # A scratch directory has a point in its name; nothing has named it, nor one that is newer.
        if "." in path.name or path.name > committed:
            shutil.rmtree(path, ignore_errors=True)
        elif (kept := set_aside(manifest)) is not None:
            aside.append((manifest, kept))
    return aside
