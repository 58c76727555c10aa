"""Commits of a core: a version, the checkpoint that covers it, and the record of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from common.api.calls.hint import Look
from common.api.engine import Engine
from common.base.errors import MeshError
from common.job.bundle.job_data import JobData
from common.job.changing import in_force
from common.mesh.runtime.mesh import Mesh
from common.mesh.runtime.patience import patiently
from common.state import registry, steps
from services.trainer.core.position import Position
from services.trainer.gang.compute import Compute
from services.trainer.steps.evaluation_gate import evaluated
from services.trainer.steps.step import Enter, Stepped
from services.trainer.steps.step_parts import PAUSE, StepParts
from services.trainer.versions.checkpointing import Checkpoints
from services.trainer.versions.publishing import Publisher, VersionIdentity

EVALUATION = "evaluation"  # the part of a step that its commit waits for one


class Commits:
    """Those of one core; `announce` is told the manifest of each version."""

    def __init__(
        self,
        mesh: Mesh,
        data: JobData,
        compute: Compute,
        position: Position,
        publisher: Publisher,
        checkpoints: Checkpoints,
        enter: Enter,
        announce: Callable[[str], None],
    ) -> None:
        self._mesh, self._data, self._compute = mesh, data, compute
        self._position, self._publisher, self._checkpoints = position, publisher, checkpoints
        self._enter, self._announce = enter, announce

    async def first(self, cached: bool) -> None:
        """Commit version 0."""
        mesh, position = self._mesh, self._position
        self._enter("staging", 0)
        staged = await self._stage(0)
        self._enter("checkpointing", 0)
        account = {"version": 0, "warm_start_cached": cached}
        await self._checkpoints.begin(position.lineage, 0, staged, account)
        await self._checkpoints.settled(required=True)
        commit = partial(
            steps.commit_initial,
            mesh.state,
            self._data.id,
            mesh.name,
            mesh.token,
            position.lineage,
            names_of(staged, self._checkpoints.name),
        )
        await patiently(mesh.clock, commit)
        position.commit(0, staged, covered=0)
        self._announce(position.manifest)

    async def step(
        self, step: int, done: Stepped, metrics: dict[str, Any], parts: StepParts
    ) -> None:
        """Commit a step once its version is in the store, and its predecessor is evaluated."""
        mesh, position, checkpoints = self._mesh, self._position, self._checkpoints
        with parts.of(EVALUATION):
            await evaluated(mesh, self._data, step - 1)
        self._enter("staging", step)
        with parts.of("stage"):
            staged = await self._stage(step)
        position.staged = step, staged
        if checkpoints.due(step):
            self._enter("checkpointing", step)
            batch = done.batch.groups, done.batch.filtered
            read = partial(steps.checkpoint_state, mesh.state, self._data.id, *batch)
            account = await patiently(mesh.clock, read)
            with parts.of("checkpoint"):
                await checkpoints.begin(position.lineage, step, staged, account)
            metrics[PAUSE] = checkpoints.pause_s
        if step == self._data.config.budget.steps:
            await checkpoints.settled(required=True)
        self._enter("committing", step)
        record = {
            "ranks": self._compute.division.told,
            "updates": done.updates,
            "settings": in_force(self._data.config),
        }
        covered = checkpoints.step
        commit = partial(
            steps.commit_step,
            mesh.state,
            self._data.id,
            mesh.name,
            mesh.token,
            position.lineage,
            steps.StepCommit(
                step,
                done.batch.groups,
                done.batch.filtered,
                names_of(staged, checkpoints.name),
                metrics,
                record,
                covered,
            ),
        )
        with parts.of("commit"):
            committed = await patiently(mesh.clock, commit)
        position.commit(committed.version, staged, covered)
        self._announce(position.manifest)
        self._enter("telling", step)
        with parts.of("tell"):
            await self._tell_engines()

    async def _stage(self, step: int) -> VersionIdentity:
        """Write the weights as they are now as a version that nobody sees yet."""
        position = self._position
        staged = await self._publisher.stage(position.lineage, step, position.manifest)
        return VersionIdentity(staged.digest, staged.image, staged.masters)

    async def _tell_engines(self) -> None:
        """Hint that there is a new version; an engine that misses it looks by itself."""
        try:
            for entry in await registry.entries(self._mesh.state, "engine"):
                if entry.alive:
                    await self._mesh.ref(entry.name).cast(Engine.look, Look("version"))
        except MeshError as error:
            self._mesh.telemetry.log.warning("hint", error=str(error))


def names_of(version: VersionIdentity, checkpoint: str) -> steps.VersionNames:
    """The names by which a commit records a version."""
    return steps.VersionNames(version.manifest, checkpoint, version.image, version.masters)
