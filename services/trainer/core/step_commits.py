"""Commits of a core: a version, its checkpoint, and the record of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from meshrl.common.api.calls.interface import ChangeHint
from meshrl.common.api.engine import Engine
from meshrl.common.base.errors import MeshError
from meshrl.common.job.change_rules import select_recorded
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import registry, steps
from meshrl.services.trainer.steps.step_durations import CHECKPOINT_PAUSE, StepPartTimer
from meshrl.services.trainer.steps.training_step import StepResult
from meshrl.services.trainer.versions.publishing import VersionIdentity

if TYPE_CHECKING:
    from meshrl.services.trainer.core.core import TrainerCore
from contextlib import nullcontext

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.evaluation_plan import plan_step_evaluation
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.process_names import shard_name

POLL_S = 0.1


async def wait_for_evaluation(mesh: Mesh, data: JobData, version: int) -> None:
    """Wait for the evaluation of `version`, if one is due, for at most `evaluation.max_wait_s`.

    After the limit training continues, and late results are left out of the figures.
    """
    plan = plan_step_evaluation(data.config, version)
    if plan is None:
        return
    until = mesh.job_clock.monotonic() + data.config.evaluation.max_wait_s
    waited_for = f"the evaluation of version {version}"
    while True:
        is_paused = mesh.job_clock.is_paused  # the deadline restarts after a pause
        with nullcontext() if is_paused else mesh.wait(waited_for, on=shard_name(data.id, 0)):
            while mesh.job_clock.is_paused == is_paused:
                if not await retry(
                    mesh.clock, lambda: jobs.is_evaluation_pending(mesh.state, data.id, plan.tag)
                ):
                    return
                if mesh.job_clock.monotonic() > until:
                    mesh.log.warning("continuing without the evaluation", version=version)
                    return
                await mesh.clock.sleep(POLL_S)


EVALUATION_PART = "evaluation"  # part of a step in which the commit waits for an evaluation


class StepCommitter:
    """Committer of one core's steps; it publishes each version's manifest to the hybrids."""

    def __init__(self, core: TrainerCore) -> None:
        self._core, self._mesh, self._data = core, core.mesh, core.data

    async def commit_first_version(self, is_cached: bool) -> None:
        core, mesh, position = self._core, self._mesh, self._core.position
        core.enter_phase("staging", 0)
        staged = await self._stage_version(0)
        core.enter_phase("checkpointing", 0)
        account = {"version": 0, "warm_start_cached": is_cached}
        await core.checkpoints.begin_checkpoint(position.lineage, 0, staged, account)
        await core.checkpoints.wait_until_written(required=True)
        about = self._data.id, mesh.name, mesh.token, position.lineage
        names = build_version_names(staged, core.checkpoints.last_name)
        await retry(mesh.clock, partial(steps.commit_initial, mesh.state, *about, names))
        position.commit(0, staged, checkpointed_version=0)
        core.gradients.announce_weights(position.manifest)

    async def commit_step(
        self, step: int, result: StepResult, metrics: dict[str, Any], part_timer: StepPartTimer
    ) -> None:
        """Commit a step once its version is stored and the previous version is evaluated."""
        core, mesh, position = self._core, self._mesh, self._core.position
        checkpoints = core.checkpoints
        with part_timer.measure(EVALUATION_PART):
            await wait_for_evaluation(mesh, self._data, step - 1)
            await self._read_last_step(step - 1)
        core.enter_phase("staging", step)
        with part_timer.measure("stage"):
            staged = await self._stage_version(step)
        position.staged_version = step, staged
        if checkpoints.is_due(step, core.last_step):
            core.enter_phase("checkpointing", step)
            batch = result.batch.group_ids, result.batch.filtered_ids
            read = partial(steps.read_checkpoint_state, mesh.state, self._data.id, *batch)
            account = await retry(mesh.clock, read)
            with part_timer.measure("checkpoint"):
                await checkpoints.begin_checkpoint(position.lineage, step, staged, account)
            metrics[CHECKPOINT_PAUSE] = checkpoints.pause_s
        if step == core.last_step:
            await checkpoints.wait_until_written(required=True)
        core.enter_phase("committing", step)
        record = {
            "ranks": core.compute.division.document,
            "updates": result.updates,
            "block_rounds": result.block_rounds,
            "settings": select_recorded(self._data.config),
        }
        covered = checkpoints.last_step
        names = build_version_names(staged, checkpoints.last_name)
        about = self._data.id, mesh.name, mesh.token, position.lineage
        step_commit = steps.StepCommit(
            step, result.batch.group_ids, result.batch.filtered_ids, names, metrics, record, covered
        )
        commit = partial(steps.commit_step, mesh.state, *about, step_commit)
        with part_timer.measure("commit"):
            committed = await retry(mesh.clock, commit)
        position.commit(committed.version, staged, covered)
        core.gradients.announce_weights(position.manifest)
        core.enter_phase("telling", step)
        with part_timer.measure("tell"):
            try:  # a hint that a version is new; engines that miss it poll
                for entry in await registry.list_entries(mesh.state, "engine"):
                    if entry.alive:
                        await mesh.ref(entry.name).cast(Engine.notify_change, ChangeHint("version"))
            except MeshError as error:
                mesh.telemetry.log.warning("hint", error=str(error))

    async def _read_last_step(self, version: int) -> None:
        """Read the job's last step, if an evaluation of `version` may have stopped it early."""
        mesh, data = self._mesh, self._data
        if data.config.evaluation.patience and plan_step_evaluation(data.config, version):
            row = await retry(mesh.clock, lambda: jobs.read_job(mesh.state, data.id))
            self._core.last_step = row.last_step

    async def _stage_version(self, step: int) -> VersionIdentity:
        """Write the current weights as a version that is not visible yet."""
        position = self._core.position
        staged = await self._core.publisher.stage_version(position.lineage, step, position.manifest)
        return VersionIdentity(staged.digest, staged.published_identity, staged.masters_identity)


def build_version_names(version: VersionIdentity, checkpoint: str) -> steps.VersionReferences:
    return steps.VersionReferences(
        version.manifest, checkpoint, version.published_identity, version.masters_identity
    )
