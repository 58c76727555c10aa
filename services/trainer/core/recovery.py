"""Recovery from a checkpoint: repeats later steps from their records."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from meshrl.common.api.weights import Checkpoint
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.change_rules import restore_recorded
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import jobs, steps
from meshrl.common.weights.staging import stage_manifest
from meshrl.services.trainer.core.position import CommittedVersion
from meshrl.services.trainer.core.step_commits import build_version_names
from meshrl.services.trainer.versions.publishing import VersionIdentity
from meshrl.services.trainer.versions.restoring import CheckpointRestorer

if TYPE_CHECKING:
    from meshrl.services.trainer.core.core import TrainerCore


class Recovery:
    def __init__(self, core: TrainerCore) -> None:
        self._core, self._mesh, self._data = core, core.mesh, core.data
        self._compute = core.compute
        self._restorer = CheckpointRestorer(
            core.mesh, core.bulk, core.data, core.compute, core.enter_phase
        )
        self._applied_config = core.data.config  # configuration that `compute` was created with

    async def recover(self, row: jobs.JobRow) -> CommittedVersion:
        """Restore the checkpoint and replay the steps that it does not cover.

        A lineage opens at the restored checkpoint if the replay does not give the committed weights
        bit by bit, or if an older checkpoint replaces a corrupt one. Raise ConfigError if none is
        intact.
        """
        name, checkpoint = await self._restorer.restore_newest(row.checkpoint)
        if name != row.checkpoint:
            return await self._open_lineage(name, checkpoint, row)
        if checkpoint.step == row.version and checkpoint.weights != row.manifest:
            raise ConfigError(
                f"checkpoint {name} has other weights than version {checkpoint.step}",
                where=self._mesh.name,
                fix="Remove it, and resume the run from the checkpoint before it",
            )
        # Ranks with another division than those of a checkpoint resume in a new lineage. In a
        # lineage that began there, records name the division of each step.
        is_same_division = checkpoint.account.get("ranks", 1) == self._compute.division.document
        if (is_same_division or row.lineage > checkpoint.lineage) and await self._replay_steps(
            checkpoint, row
        ):
            origin_lineage = row.lineage if row.version > checkpoint.step else checkpoint.lineage
            weights = VersionIdentity(row.manifest, row.image, row.masters)
            return CommittedVersion(
                row.version, row.lineage, weights, origin_lineage, name, checkpoint.step
            )
        if row.version > checkpoint.step:
            await self._restorer.restore(name, checkpoint)
        return await self._open_lineage(name, checkpoint, row)

    async def _open_lineage(
        self, name: str, checkpoint: Checkpoint, row: jobs.JobRow
    ) -> CommittedVersion:
        """Open a lineage at a checkpoint; an older one repeats the prompts since then."""
        operation = f"reopen-{row.lineage}-{checkpoint.step}-{self._mesh.incarnation}"
        account = checkpoint.account if name != row.checkpoint else None
        about = self._data.id, self._mesh.name, self._mesh.token, checkpoint.step
        weights = VersionIdentity(checkpoint.weights, checkpoint.image, checkpoint.masters)
        names = build_version_names(weights, name)
        reopen = partial(steps.open_lineage, self._mesh.state, *about, names, operation, account)
        lineage = await retry(self._mesh.clock, reopen)
        self._mesh.telemetry.log.warning(
            "new lineage", lineage=lineage, version=checkpoint.step, was=row.version
        )
        step, origin_lineage = checkpoint.step, checkpoint.lineage
        return CommittedVersion(step, lineage, weights, origin_lineage, name, step)

    async def _replay_steps(self, checkpoint: Checkpoint, row: jobs.JobRow) -> bool:
        """Replay the steps since the checkpoint; return True if the committed masters result."""
        read_records = partial(
            steps.read_step_records, self._mesh.state, self._data.id, checkpoint.step
        )
        records = await retry(self._mesh.clock, read_records)
        expected = list(range(checkpoint.step + 1, row.version + 1))
        if [record.step for record in records] != expected:
            return False
        is_repeated = await self._repeat_steps(records)
        await self._apply_config(self._data.config)
        if not is_repeated or not records:
            return is_repeated
        self._core.enter_phase("staging", row.version)
        staged = await self._core.publisher.write_version(
            row.lineage, row.version, checkpoint.weights
        )
        if staged.masters_identity != row.masters:
            return False
        if staged.digest == row.manifest:  # otherwise it was published in another dtype
            await stage_manifest(self._mesh, staged)
        return True

    async def _repeat_steps(self, records: list[steps.StepRecord]) -> bool:
        """Repeat the recorded steps; return False if one cannot be repeated."""
        for record in records:
            if record.replay_data.get("ranks") != self._compute.division.document:
                return False
            self._core.enter_phase("replaying", record.step)
            found = await self._core.intake.fetch_groups(record.groups)
            groups = [group for group in found if group is not None]
            if len(groups) < len(found):
                return False
            config = restore_recorded(self._data.config, record.replay_data.get("settings", {}))
            await self._apply_config(config)
            step = self._core._make_step(record.step, "", config)
            updates = record.replay_data["updates"]
            block_rounds = record.replay_data.get("block_rounds", [1] * len(updates))
            await step.replay(groups, updates, block_rounds)
        return True

    async def _apply_config(self, config: JobConfig) -> None:
        if config is not self._applied_config:
            await self._compute.update_settings(config.algorithm, config.optimizer)
        self._applied_config = config
