"""Commits of a core: a version, the checkpoint that covers it, and the record of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from meshrl.common.api.calls.interface import Look
from meshrl.common.api.engine import Engine
from meshrl.common.base.errors import MeshError
from meshrl.common.job.changing import in_force
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import registry, steps
from meshrl.services.trainer.steps.step import Stepped
from meshrl.services.trainer.steps.step_parts import PAUSE, StepParts
from meshrl.services.trainer.versions.publishing import VersionIdentity

if TYPE_CHECKING:
    from meshrl.services.trainer.core.core import TrainerCore
from contextlib import nullcontext

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.evaluation_plan import due
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.names import shard

LOOK_S = 0.1


async def evaluated(mesh: Mesh, data: JobData, version: int) -> None:
    """Waits for the evaluation that `version` asks for, if it does, at most `evaluation.hold_s`;
    past it training goes on, and what is evaluated later is left out of the figures.
    """
    plan = due(data.config, version)
    if plan is None:
        return
    until = mesh.job_clock.monotonic() + data.config.evaluation.hold_s
    waited_for = f"the evaluation of version {version}"
    while True:
        held = mesh.job_clock.held  # nobody is late in a pause: the wait begins anew after it
        with nullcontext() if held else mesh.wait(waited_for, on=shard(data.id, 0)):
            while mesh.job_clock.held == held:
                if not await patiently(
                    mesh.clock, lambda: jobs.awaits_evaluation(mesh.state, data.id, plan.tag)
                ):
                    return
                if mesh.job_clock.monotonic() > until:
                    mesh.log.warning("going on without the evaluation", version=version)
                    return
                await mesh.clock.sleep(LOOK_S)


EVALUATION = "evaluation"  # the part of a step that its commit waits for one


class Commits:
    """Those of one core, whose hybrids are told the manifest of each version."""

    def __init__(self, core: TrainerCore) -> None:
        self._core, self._mesh, self._data = core, core.mesh, core.data

    async def first(self, cached: bool) -> None:
        core, mesh, position = self._core, self._mesh, self._core.position
        core.enter("staging", 0)
        staged = await self._stage(0)
        core.enter("checkpointing", 0)
        account = {"version": 0, "warm_start_cached": cached}
        await core.checkpoints.begin(position.lineage, 0, staged, account)
        await core.checkpoints.settled(required=True)
        about = self._data.id, mesh.name, mesh.token, position.lineage
        names = names_of(staged, core.checkpoints.name)
        await patiently(mesh.clock, partial(steps.commit_initial, mesh.state, *about, names))
        position.commit(0, staged, covered=0)
        core.gradients.announce(position.manifest)

    async def step(
        self, step: int, done: Stepped, metrics: dict[str, Any], parts: StepParts
    ) -> None:
        """Commit a step once its version is in the store, and its predecessor is evaluated."""
        core, mesh, position = self._core, self._mesh, self._core.position
        checkpoints = core.checkpoints
        with parts.of(EVALUATION):
            await evaluated(mesh, self._data, step - 1)
        core.enter("staging", step)
        with parts.of("stage"):
            staged = await self._stage(step)
        position.staged = step, staged
        if checkpoints.due(step):
            core.enter("checkpointing", step)
            batch = done.batch.groups, done.batch.filtered
            read = partial(steps.checkpoint_state, mesh.state, self._data.id, *batch)
            account = await patiently(mesh.clock, read)
            with parts.of("checkpoint"):
                await checkpoints.begin(position.lineage, step, staged, account)
            metrics[PAUSE] = checkpoints.pause_s
        if step == self._data.config.budget.steps:
            await checkpoints.settled(required=True)
        core.enter("committing", step)
        record = {
            "ranks": core.compute.division.told,
            "updates": done.updates,
            "settings": in_force(self._data.config),
        }
        covered = checkpoints.step
        names = names_of(staged, checkpoints.name)
        about = self._data.id, mesh.name, mesh.token, position.lineage
        made = steps.StepCommit(
            step, done.batch.groups, done.batch.filtered, names, metrics, record, covered
        )
        commit = partial(steps.commit_step, mesh.state, *about, made)
        with parts.of("commit"):
            committed = await patiently(mesh.clock, commit)
        position.commit(committed.version, staged, covered)
        core.gradients.announce(position.manifest)
        core.enter("telling", step)
        with parts.of("tell"):
            try:  # a hint that there is a new version; an engine that misses it looks by itself
                for entry in await registry.entries(mesh.state, "engine"):
                    if entry.alive:
                        await mesh.ref(entry.name).cast(Engine.look, Look("version"))
            except MeshError as error:
                mesh.telemetry.log.warning("hint", error=str(error))

    async def _stage(self, step: int) -> VersionIdentity:
        """Write the weights as they are now as a version that nobody sees yet."""
        position = self._core.position
        staged = await self._core.publisher.stage(position.lineage, step, position.manifest)
        return VersionIdentity(staged.digest, staged.image, staged.masters)


def names_of(version: VersionIdentity, checkpoint: str) -> steps.VersionNames:
    return steps.VersionNames(version.manifest, checkpoint, version.image, version.masters)
