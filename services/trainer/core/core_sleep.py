"""Sleep of a training core: between two pieces of arithmetic, with the current step as it is.

A core that replaces a dead one resumes from offloaded state of the committed version. An
interrupted step begins again from its lease of groups.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from meshrl.common.base.errors import CorruptData, MeshError, Refused
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import jobs, steps
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.trainer.core.position import build_committed_version

if TYPE_CHECKING:
    from meshrl.services.trainer.core.core import TrainerCore

POLL_S = 0.05  # between two checks whether a step has been committed
COMMIT_TIMEOUT_S = 300.0  # for a computed step, to stage, or for its evaluation


class CoreSleeper:
    """Sleeper that pauses and resumes the core's own activity."""

    def __init__(self, core: TrainerCore) -> None:
        self._core = core

    @property
    def is_removable(self) -> bool:
        """True if the newest checkpoint is of the current version."""
        core, position = self._core, self._core.position
        return (
            core.is_ready
            and core.checkpoints.last_step == position.version == position.checkpointed_version
        )

    async def sleep(self, tier: Tier) -> None:
        """Pause leases of groups and rounds, and offload the state; see `GangCompute.sleep`."""
        core = self._core
        if not core.is_ready:
            raise Refused(
                "the core is starting", where=core.mesh.name, fix="Wait until it is ready"
            )
        self._set_paused(True)
        try:
            await core.compute.sleep(partial(core.describe_state, tier=tier), tier)
        except BaseException:
            self._set_paused(False)
            raise

    async def wake(self) -> None:
        """Resume where the core stopped; after CorruptData, from a checkpoint of the last step."""
        try:
            await self._core.compute.wake()
        except CorruptData:
            self._set_paused(False)
            raise
        self._set_paused(False)

    async def move(self, tier: Tier) -> None:
        await self._core.compute.move(tier)

    def _set_paused(self, paused: bool) -> None:
        core = self._core
        core.gradients.is_asleep = paused
        if paused:
            core.intake.is_awake.clear()
        else:
            core.intake.is_awake.set()

    async def prepare_removal(self) -> None:
        """Stop for good with a committed checkpoint of the current version.

        A step whose update is applied is committed before. Any other step begins again elsewhere.
        Raise Refused if the commit takes too long, for instance in a pause, when no evaluation
        runs.
        """
        core = self._core
        if not core.is_ready:
            raise Refused(
                "the core is starting", where=core.mesh.name, fix="Wait until it is ready"
            )
        stood_still = core.gradients.is_asleep
        self._set_paused(True)
        try:
            if not self.is_removable:
                await self._pause_at_committed_step()
                await self._write_checkpoint()
            await core.compute.move(Tier.ABSENT)  # other ranks may exit from here on
        except BaseException:
            core.runner.resume_steps()
            self._set_paused(stood_still)
            raise

    async def _pause_at_committed_step(self) -> None:
        core, clock = self._core, self._core.mesh.clock
        until = clock.monotonic() + COMMIT_TIMEOUT_S
        while True:
            await core.runner.pause_steps()
            if core.describe_state()["version"] == core.position.version:
                return
            if clock.monotonic() > until:
                raise Refused(
                    f"step {core.position.version + 1} is not committed after "
                    f"{COMMIT_TIMEOUT_S:g} s",
                    where=core.mesh.name,
                    fix="Retry when the job continues, or when its evaluation is complete",
                )
            core.runner.resume_steps()  # its computed step is committed soon
            await clock.sleep(POLL_S)

    async def cancel_removal(self) -> None:
        with suppress(MeshError):  # the next piece detects a lost rank
            await self._core.compute.move(Tier.ACCELERATOR)
        self._core.runner.resume_steps()
        self._set_paused(False)

    async def _write_checkpoint(self) -> None:
        core, state, job = self._core, self._core.mesh.state, self._core.data.id
        clock, position = core.mesh.clock, core.position
        account = await retry(clock, lambda: steps.read_checkpoint_state(state, job))
        lineage, step = position.lineage, position.version
        await core.checkpoints.begin_checkpoint(lineage, step, position.weights, account)
        await core.checkpoints.wait_until_written(required=True)
        about = core.mesh.name, core.mesh.token, lineage, step, core.checkpoints.last_name
        await retry(clock, lambda: steps.record_checkpoint(state, job, *about))
        position.checkpointed_version = step

    async def try_resume(self, row: jobs.JobRow) -> bool:
        """Resume from offloaded state and remove it; return False unless it is the job's
        version.
        """
        core = self._core
        kinds = core.compute.kinds
        try:
            found = await kinds.find_record()
        except MeshError as error:  # its worker is unreachable
            core.mesh.telemetry.log.warning("offloaded state is unreachable", error=str(error))
            return False
        if found is None:
            await kinds.drop_copies()  # of an earlier run that died awake
            return False
        tier, about = found
        mine = (about["job"], about["lineage"], about["version"], about["ranks"])
        stands = (core.data.id, row.lineage, row.version, core.compute.division.document)
        # Another process may have committed this step since, from other groups. Then the weights
        # are equal, but not the version number.
        same = about["manifest"] == row.manifest != ""
        fits = mine == stands and same and about["checkpoint"] == row.checkpoint
        went_on = fits and await core.compute.resume(about)
        core.mesh.telemetry.log.info("kept", tier=tier, of=list(mine), used=went_on)
        await kinds.drop_copies()
        if went_on:
            core.resume_from(build_committed_version(row, about))
        return went_on
