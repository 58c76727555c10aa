"""How a training core sleeps: between two pieces of arithmetic, the step under way as it is.

Who starts in its place after a death goes on from what it kept, if those are the weights of the
version that is committed; a step that was under way begins again from its lease of groups.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from meshrl.common.base.errors import Damaged, MeshError, Refused
from meshrl.common.mesh.residents.tiers import Keep, Take
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import jobs, steps
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.trainer.core.position import committed_of

if TYPE_CHECKING:
    from meshrl.services.trainer.core.core import TrainerCore

LOOK_S = 0.05  # how often it is seen whether a step has been committed
COMMIT_S = 300.0  # for a step that is computed: to stage, or for its evaluation, if that comes


class CoreSleeper:
    """Stops what the core does by itself, and lets it go on."""

    def __init__(self, core: TrainerCore) -> None:
        self._core = core

    @property
    def bytes(self) -> int:
        return self._core.compute.bytes

    @property
    def covered(self) -> bool:
        """Whether the newest checkpoint is of the current version."""
        core, position = self._core, self._core.position
        return core.ready and core.checkpoints.step == position.version == position.covered

    async def sleep(self, keep: Keep) -> None:
        """Leases no groups and gives no rounds from now on; see `Compute.sleep`."""
        core = self._core
        if not core.ready:
            raise Refused("it is starting", where=core.mesh.name, fix="wait until it is ready")
        self._stand_still(True)
        try:
            about = partial(core.standing, tier=core.tiers.heading)
            await core.compute.sleep(about, keep)
        except BaseException:
            self._stand_still(False)
            raise

    async def wake(self, take: Take) -> None:
        """Goes on where it stopped; Damaged: from the last committed step, by a checkpoint."""
        try:
            await self._core.compute.wake(take)
        except Damaged:
            self._stand_still(False)
            raise
        self._stand_still(False)

    async def move(self, tier: Tier) -> None:
        await self._core.compute.move(tier)

    def _stand_still(self, still: bool) -> None:
        core = self._core
        core.gradients.asleep = still
        if still:
            core.intake.awake.clear()
        else:
            core.intake.awake.set()

    async def cover(self) -> None:
        """Stands still for good, with a committed checkpoint of the current version. A step whose
        update is made is committed before; any other begins again elsewhere. Refused when that is
        not committed in time, as in a pause, in which nobody evaluates.
        """
        core = self._core
        if not core.ready:
            raise Refused("it is starting", where=core.mesh.name, fix="wait until it is ready")
        stood_still = core.gradients.asleep
        self._stand_still(True)
        try:
            if not self.covered:
                await self._hold_what_is_committed()
                await self._checkpoint()
            await core.compute.move(Tier.ABSENT)  # other ranks may end from here on
        except BaseException:
            core.runner.let_go()
            self._stand_still(stood_still)
            raise

    async def _hold_what_is_committed(self) -> None:
        core, clock = self._core, self._core.mesh.clock
        until = clock.monotonic() + COMMIT_S
        while True:
            await core.runner.hold()
            if core.standing()["version"] == core.position.version:
                return
            if clock.monotonic() > until:
                raise Refused(
                    f"step {core.position.version + 1} is not committed after {COMMIT_S:g} s",
                    where=core.mesh.name,
                    fix="ask again when the job goes on, or its evaluation is there",
                )
            core.runner.let_go()  # what it has computed is committed soon
            await clock.sleep(LOOK_S)

    async def uncover(self) -> None:
        with suppress(MeshError):  # a rank that is lost is found so by the next piece
            await self._core.compute.move(Tier.ACCELERATOR)
        self._core.runner.let_go()
        self._stand_still(False)

    async def _checkpoint(self) -> None:
        core, state, job = self._core, self._core.mesh.state, self._core.data.id
        clock, position = core.mesh.clock, core.position
        account = await patiently(clock, lambda: steps.checkpoint_state(state, job))
        lineage, step = position.lineage, position.version
        await core.checkpoints.begin(lineage, step, position.weights, account)
        await core.checkpoints.settled(required=True)
        about = core.mesh.name, core.mesh.token, lineage, step, core.checkpoints.name
        await patiently(clock, lambda: steps.cover(state, job, *about))
        position.covered = step

    async def resumed(self, row: jobs.JobRow) -> bool:
        """Whether the core stands where the job does, from what was kept; that is removed."""
        core = self._core
        places = core.tiers.places
        try:
            found = await places.found()
        except MeshError as error:  # its worker is away
            core.mesh.telemetry.log.warning("what was kept is out of reach", error=str(error))
            return False
        if found is None:
            return False
        tier, head = found
        about: dict[str, Any] = head.about
        mine = (about["job"], about["lineage"], about["version"], about["ranks"])
        stands = (core.data.id, row.lineage, row.version, core.compute.division.told)
        # Another start may have committed this step since, from other groups: the same weights,
        # not the same number.
        same = about["manifest"] == row.manifest != ""
        fits = mine == stands and same and about["checkpoint"] == row.checkpoint
        take = partial(places.take, tier)
        went_on = fits and await core.compute.resume(about, take)
        core.mesh.telemetry.log.info("kept", tier=tier, of=list(mine), used=went_on)
        await places.forget()
        if went_on:
            core.go_on_from(committed_of(row, about))
        return went_on
