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
    """Isolation tiers detected so far; `tiers` has PROBING while probes run, and is None without
    sandboxes.
    """

    def __init__(self, mesh: Mesh, accepted_services: Collection[str]) -> None:
        self._mesh = mesh
        runs_sandboxes = mesh.settings.joinable and SERVICE_NAMES["sandbox"] in accepted_services
        self.tiers: list[str] | None = [PROBING] if runs_sandboxes else None

    async def run(self) -> None:
        """Probe the tiers until the best one is found, and publish them in `tiers`.

        A detected tier stays: a later probe that fails removes none. Return at once if no sandbox
        may be placed here.
        """
        detected: tuple[str, ...] = ()
        probe_count = 0
        while self.tiers is not None:
            try:
                run = self._mesh.host.run_blocking
                probed = await run(isolation_probe.probe_tiers, deadline_s=PROBE_TIMEOUT_S)
            except DeadlineExceeded:
                probed = isolation_probe.IsolationTiers((), is_conclusive=False, is_finished=False)
            tiers = {*detected, *probed.tiers}
            host_tiers = [tier for tier in TIER_ORDER if tier in tiers and tier != RUNNER]
            detected = (
                *host_tiers[-1:],
                *({RUNNER} & tiers),
            )  # the best of the host's own, and `runner`
            probe_count += 1
            is_incomplete = not probed.is_finished or (
                not probed.is_conclusive and probe_count < TRIES
            )
            published = [*detected, PROBING] if is_incomplete else list(detected)
            if published != self.tiers:
                self.tiers = published
                self._mesh.telemetry.log.info("isolation", tiers=published)
            if probed.is_conclusive and has_sufficient_tier(detected, BEST_HOST_TIER):
                return
            if probed.is_finished and is_incomplete:
                await self._mesh.clock.sleep(PENDING_REPROBE_S)
            else:
                await self._mesh.clock.sleep(
                    STABLE_REPROBE_S if probed.is_conclusive and detected else REPROBE_S
                )
