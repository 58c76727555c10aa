"""Which isolation this host gives sandboxes, where the planner is to know it before it places one:
of several hosts each says its own.
"""

from __future__ import annotations

from collections.abc import Collection

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.job.isolation import isolation_probe
from meshrl.common.job.isolation.tiers import PROBING, RUNNER, TIER_ORDER, has_sufficient_tier
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES

PROBE_TIMEOUT_S = 2 * isolation_probe.PROBE_TIMEOUT_S + 5.0  # the host's own, and gVisor's
REPROBE_S = 300.0  # what is missing may be installed, and a probe fail for want of time or memory
STABLE_REPROBE_S = 3600.0  # where only an installation or another setting of the host gives more
PENDING_REPROBE_S = 60.0  # while jobs wait for the answer
TRIES = 3  # that fail: then it is taken to have no more than was found, until there is more
BEST_HOST_TIER = "bwrap"  # of a host's own: that it has no control groups is no matter of luck


class HostIsolation:
    """Tiers of isolation as far as they are known; None where nobody asks."""

    def __init__(self, mesh: Mesh, accepted_services: Collection[str]) -> None:
        self._mesh = mesh
        asked = mesh.settings.joinable and SERVICE_NAMES["sandbox"] in accepted_services
        self.tiers: list[str] | None = [PROBING] if asked else None

    async def run(self) -> None:
        """Finds out, and again while there may be more. What was found once stays: no probe that
        fails takes sandboxes away.
        """
        had: tuple[str, ...] = ()
        tries = 0
        while self.tiers is not None:
            try:
                run = self._mesh.host.run_blocking
                found = await run(isolation_probe.probe_tiers, deadline_s=PROBE_TIMEOUT_S)
            except DeadlineExceeded:
                found = isolation_probe.IsolationTiers((), is_conclusive=False, is_finished=False)
            tiers = {*had, *found.tiers}
            own = [tier for tier in TIER_ORDER if tier in tiers and tier != RUNNER]
            had = (*own[-1:], *({RUNNER} & tiers))  # the best of the host's own, and `runner`
            tries += 1
            trying = not found.is_finished or (not found.is_conclusive and tries < TRIES)
            told = [*had, PROBING] if trying else list(had)
            if told != self.tiers:
                self.tiers = told
                self._mesh.telemetry.log.info("isolation", tiers=told)
            if found.is_conclusive and has_sufficient_tier(had, BEST_HOST_TIER):
                return
            if found.is_finished and trying:
                await self._mesh.clock.sleep(PENDING_REPROBE_S)
            else:
                await self._mesh.clock.sleep(
                    STABLE_REPROBE_S if found.is_conclusive and had else REPROBE_S
                )
