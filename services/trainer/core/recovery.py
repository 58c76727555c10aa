"""Recovery: a trainer goes on at a checkpoint, and repeats the steps committed since from their
records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.api.weights import Checkpoint
from common.base.errors import ConfigError
from common.job.bundle.job_data import JobData
from common.job.changing import as_it_was
from common.job.config import JobConfig
from common.mesh.runtime.mesh import Mesh
from common.mesh.runtime.patience import patiently
from common.state import jobs, steps
from common.weights.bulk.port import BulkClient
from common.weights.staging import keep
from services.trainer.core.position import CommittedVersion
from services.trainer.gang.compute import Compute
from services.trainer.steps.intake import Intake
from services.trainer.steps.step import Enter, TrainingStep
from services.trainer.versions.publishing import Publisher, VersionIdentity
from services.trainer.versions.restoring import Restoring

# From a step's number, the manifest that it begins with, and the job as it is or was then.
MakeStep = Callable[[int, str, JobConfig], TrainingStep]


class Recovery:
    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        data: JobData,
        compute: Compute,
        intake: Intake,
        publisher: Publisher,
        make_step: MakeStep,
        enter: Enter,
    ) -> None:
        self._mesh, self._data = mesh, data
        self._publisher = publisher
        self._restoring = Restoring(mesh, bulk, data, compute, enter)
        self._compute, self._intake, self._make_step = compute, intake, make_step
        self._enter = enter
        self._adopted = data.config  # what `compute` was made with

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
        """A new lineage at a checkpoint; at an older one than the job's last, what was trained
        between the two is lost, and its prompts come again.
        """
        operation = f"reopen-{row.lineage}-{checkpoint.step}-{self._mesh.incarnation}"
        account = checkpoint.account if name != row.checkpoint else None
        lineage = await patiently(
            self._mesh.clock,
            lambda: steps.open_lineage(
                self._mesh.state,
                self._data.id,
                self._mesh.name,
                self._mesh.token,
                checkpoint.step,
                steps.VersionNames(
                    checkpoint.weights, name, image=checkpoint.image, masters=checkpoint.masters
                ),
                operation,
                account,
            ),
        )
        self._mesh.telemetry.log.warning(
            "new lineage", lineage=lineage, version=checkpoint.step, was=row.version
        )
        held = checkpoint
        weights = VersionIdentity(held.weights, held.image, held.masters)
        return CommittedVersion(held.step, lineage, weights, held.lineage, name, held.step)

    async def _replayed(self, checkpoint: Checkpoint, row: jobs.JobRow) -> bool:
        """Whether the steps since the checkpoint gave the masters of the committed version again.
        A commit of an earlier MeshRL does not tell who they were.
        """
        records = await self._ask(
            lambda: steps.step_records(self._mesh.state, self._data.id, checkpoint.step)
        )
        expected = list(range(checkpoint.step + 1, row.version + 1))
        if [record.step for record in records] != expected:
            return False
        if records and not row.masters:
            return False  # what the steps give could not be compared
        again = await self._repeated(records)
        await self._adopt(self._data.config)
        if not again or not records:
            return again
        self._enter("staging", row.version)
        staged = await self._publisher.laid(row.lineage, row.version, checkpoint.weights)
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
            self._enter("replaying", record.step)
            found = await self._intake.contents(record.groups)
            groups = [group for group in found if group is not None]
            if len(groups) < len(found):
                return False
            config = as_it_was(self._data.config, record.record.get("settings", {}))
            await self._adopt(config)
            step = self._make_step(record.step, "", config)
            await step.replay(groups, record.record["updates"])
        return True

    async def _adopt(self, config: JobConfig) -> None:
        """Computes with `config` from now on."""
        if config is not self._adopted:
            await self._compute.adopt(config.algorithm, config.optimizer)
        self._adopted = config

    async def _ask(
        self, action: Callable[[], Awaitable[list[steps.StepRecord]]]
    ) -> list[steps.StepRecord]:
        return await patiently(self._mesh.clock, action)
