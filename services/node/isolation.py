"""Which isolation this host gives sandboxes, where the planner is to know it before it places one:
of several hosts each says its own.
"""

from __future__ import annotations

from collections.abc import Collection

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.job.isolation import containment
from meshrl.common.job.isolation.isolation import ORDER, RUNNER, TRYING, contains
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.names import TAKEN

FOUND_S = 2 * containment.PROBE_S + 5.0  # the host's own, and gVisor's
AGAIN_S = 300.0  # what is missing may be installed, and a probe fail for want of time or memory
RARELY_S = 3600.0  # where only an installation or another setting of the host gives more
SOON_S = 60.0  # while jobs wait for the answer
TRIES = 3  # that fail: then it is taken to have no more than was found, until there is more
BEST = "bwrap"  # of a host's own: that it has no control groups is no matter of luck


class OwnIsolation:
    """Tiers of isolation as far as they are known; None where nobody asks."""

    def __init__(self, mesh: Mesh, takes: Collection[str]) -> None:
        self._mesh = mesh
        asked = mesh.settings.joinable and TAKEN["sandbox"] in takes
        self.tiers: list[str] | None = [TRYING] if asked else None

    async def run(self) -> None:
        """Finds out, and again while there may be more. What was found once stays: no probe that
        fails takes sandboxes away.
        """
        had: tuple[str, ...] = ()
        tries = 0
        while self.tiers is not None:
            try:
                run = self._mesh.host.run_blocking
                found = await run(containment.tiers, deadline_s=FOUND_S)
            except DeadlineExceeded:
                found = containment.IsolationTiers((), sure=False, known=False)
            tiers = {*had, *found.tiers}
            own = [tier for tier in ORDER if tier in tiers and tier != RUNNER]
            had = (*own[-1:], *({RUNNER} & tiers))  # the best of the host's own, and `runner`
            tries += 1
            trying = not found.known or (not found.sure and tries < TRIES)
            told = [*had, TRYING] if trying else list(had)
            if told != self.tiers:
                self.tiers = told
                self._mesh.telemetry.log.info("isolation", tiers=told)
            if found.sure and contains(had, BEST):
                return
            if found.known and trying:
                await self._mesh.clock.sleep(SOON_S)
            else:
                await self._mesh.clock.sleep(RARELY_S if found.sure and had else AGAIN_S)
