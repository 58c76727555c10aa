"""Isolation tiers that this host offers to sandboxes, published before the planner places one.

Hosts may offer different tiers, so each publishes its own.
"""

from __future__ import annotations

from collections.abc import Collection

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.job.isolation import isolation_probe
from meshrl.common.job.isolation.tiers import PROBING, RUNNER, TIER_ORDER, has_sufficient_tier
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES

PROBE_TIMEOUT_S = 2 * isolation_probe.PROBE_TIMEOUT_S + 5.0  # the host's own, and gVisor's
REPROBE_S = 300.0  # what is missing may be installed; a probe may lack time or memory
STABLE_REPROBE_S = 3600.0  # where only an installation or another setting of the host adds a tier
PENDING_REPROBE_S = 60.0  # while jobs wait for the answer
TRIES = 3  # failed probes after which the found tiers count as all, until there are more
BEST_HOST_TIER = "bwrap"  # of a host's own: missing control groups are no transient failure


class HostIsolation:
    """Isolation tiers as far as they are detected; None where no sandbox needs them."""

    def __init__(self, mesh: Mesh, accepted_services: Collection[str]) -> None:
        self._mesh = mesh
        asked = mesh.settings.joinable and SERVICE_NAMES["sandbox"] in accepted_services
        self.tiers: list[str] | None = [PROBING] if asked else None

    async def run(self) -> None:
        """Detect the tiers, and again while more may become available.

        A detected tier stays: a probe that fails later takes no sandbox away.
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
