"""Recovery: goes on at a checkpoint, and repeats the steps since from their records."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from meshrl.common.api.weights import Checkpoint
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.changing import as_it_was
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import jobs, steps
from meshrl.common.weights.staging import keep
from meshrl.services.trainer.core.committing import names_of
from meshrl.services.trainer.core.position import CommittedVersion
from meshrl.services.trainer.versions.publishing import VersionIdentity
from meshrl.services.trainer.versions.restoring import Restoring

if TYPE_CHECKING:
    from meshrl.services.trainer.core.core import TrainerCore


class Recovery:
    def __init__(self, core: TrainerCore) -> None:
        self._core, self._mesh, self._data = core, core.mesh, core.data
        self._compute = core.compute
        self._restoring = Restoring(core.mesh, core.bulk, core.data, core.compute, core.enter)
        self._adopted = core.data.config  # what `compute` was made with

    async def recover(self, row: jobs.JobRow) -> CommittedVersion:
        """Replays what the job's checkpoint does not cover. When that does not give the committed
        weights bit by bit, or the checkpoint is damaged and an older one takes its place, a new
        lineage opens at the one that is used. ConfigError when none is whole.
        """
        name, checkpoint = await self._restoring.usable(row.checkpoint)
        if name != row.checkpoint:
            return await self._reopened(name, checkpoint, row)
        if checkpoint.step == row.version and checkpoint.weights != row.manifest:
            raise ConfigError(
                f"checkpoint {name} holds other weights than version {checkpoint.step}",
                where=self._mesh.name,
                fix="remove it, and resume the run from the one before",
            )
        # Ranks that divide rounds otherwise than those that made a checkpoint go on from it in a
        # lineage that is new. In one that began there, records say which ranks made the steps.
        alike = checkpoint.account.get("ranks", 1) == self._compute.division.told
        if (alike or row.lineage > checkpoint.lineage) and await self._replayed(checkpoint, row):
            born = row.lineage if row.version > checkpoint.step else checkpoint.lineage
            weights = VersionIdentity(row.manifest, row.image, row.masters)
            return CommittedVersion(row.version, row.lineage, weights, born, name, checkpoint.step)
        if row.version > checkpoint.step:
            await self._restoring.restore(name, checkpoint)
        return await self._reopened(name, checkpoint, row)

    async def _reopened(
        self, name: str, checkpoint: Checkpoint, row: jobs.JobRow
    ) -> CommittedVersion:
        """Open a lineage at a checkpoint; at an older one, prompts since then come again."""
        operation = f"reopen-{row.lineage}-{checkpoint.step}-{self._mesh.incarnation}"
        account = checkpoint.account if name != row.checkpoint else None
        about = self._data.id, self._mesh.name, self._mesh.token, checkpoint.step
        weights = VersionIdentity(checkpoint.weights, checkpoint.image, checkpoint.masters)
        names = names_of(weights, name)
        reopen = partial(steps.open_lineage, self._mesh.state, *about, names, operation, account)
        lineage = await patiently(self._mesh.clock, reopen)
        self._mesh.telemetry.log.warning(
            "new lineage", lineage=lineage, version=checkpoint.step, was=row.version
        )
        step, born = checkpoint.step, checkpoint.lineage
        return CommittedVersion(step, lineage, weights, born, name, step)

    async def _replayed(self, checkpoint: Checkpoint, row: jobs.JobRow) -> bool:
        """Whether the steps since the checkpoint gave the committed version's masters again."""
        asked = partial(steps.step_records, self._mesh.state, self._data.id, checkpoint.step)
        records = await patiently(self._mesh.clock, asked)
        expected = list(range(checkpoint.step + 1, row.version + 1))
        if [record.step for record in records] != expected:
            return False
        again = await self._repeated(records)
        await self._adopt(self._data.config)
        if not again or not records:
            return again
        self._core.enter("staging", row.version)
        staged = await self._core.publisher.laid(row.lineage, row.version, checkpoint.weights)
        if staged.masters != row.masters:
            return False
        if staged.digest == row.manifest:  # else it was published in another type than it is now
            await keep(self._mesh, staged)
        return True

    async def _repeated(self, records: list[steps.StepRecord]) -> bool:
        """Does the steps again, each as it was done; False when one of them cannot be."""
        for record in records:
            if record.record.get("ranks") != self._compute.division.told:
                return False
            self._core.enter("replaying", record.step)
            found = await self._core.intake.contents(record.groups)
            groups = [group for group in found if group is not None]
            if len(groups) < len(found):
                return False
            config = as_it_was(self._data.config, record.record.get("settings", {}))
            await self._adopt(config)
            step = self._core._make_step(record.step, "", config)
            await step.replay(groups, record.record["updates"])
        return True

    async def _adopt(self, config: JobConfig) -> None:
        if config is not self._adopted:
            await self._compute.adopt(config.algorithm, config.optimizer)
        self._adopted = config
