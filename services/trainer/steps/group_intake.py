"""Intake of a step: leases groups as they become ready, and fetches their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from meshrl.common.api.transfer.bulk_permissions import GROUPS
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.base.errors import BadMessage, CorruptData, NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state.groups import (
    GroupRow,
    LeasedGroups,
    filter_group,
    lease_groups,
    requeue_lost_group,
    requeue_stale_group,
)
from meshrl.common.state.pool.workers.process_names import shard_name
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.store.weight_store_client import fetch_chunk
from meshrl.services.trainer.steps.batch import validate_group

POLL_S = 0.03  # between two checks for ready groups
PAUSED_POLL_S = 0.5  # while the job is paused
FILTER_TIMEOUT_S = 60.0  # to check one group's rewards


class GroupIntake:
    def __init__(self, mesh: Mesh, bulk: BulkClient, job: str) -> None:
        self._mesh, self._bulk, self._job = mesh, bulk, job
        self.waited_s = 0.0  # seconds of waiting for groups while awake, over all steps
        self.is_awake = asyncio.Event()  # no group is leased while it is not set
        self.is_awake.set()

    async def stream_groups(
        self,
        step: int,
        is_stale: Callable[[TrajectoryGroup], bool],
        try_replace: Callable[[TrajectoryGroup], bool] = lambda group: False,
    ) -> AsyncIterator[TrajectoryGroup]:
        """Yield each group of the step once, as soon as it may train.

        A group is requeued and another takes its place if its bytes are missing or malformed, or
        its tokens are staler than its row states. A group for which `try_replace` is true ends, and
        another takes its place.
        """
        given, log = set[int](), self._mesh.telemetry.log
        while True:
            leased = await self._lease_new_groups(step, given)
            for row, group in zip(
                leased.groups, await self.fetch_groups(leased.groups), strict=True
            ):
                if group is None:
                    reason = "poisoned"
                    log.error("group requeued", group=row.group, reason=reason)
                    await self._return_group(
                        requeue_lost_group, row, reason, f"{reason}-{row.group}"
                    )
                elif is_stale(group):
                    log.error("group is staler than its record", group=row.group)
                    await self._return_group(requeue_stale_group, row, f"stale-{row.group}")
                elif await self._mesh.host.run_blocking(
                    try_replace, group, deadline_s=FILTER_TIMEOUT_S
                ):
                    await self._return_group(filter_group, row, f"filtered-{row.group}")
                else:
                    given.add(row.group)
                    yield group
            if leased.wait is None and given.issuperset(row.group for row in leased.groups):
                return

    async def fetch_groups(self, rows: Sequence[GroupRow]) -> list[TrajectoryGroup | None]:
        return list(await asyncio.gather(*(self._fetch_group(row) for row in rows)))

    async def _lease_new_groups(self, step: int, yielded: set[int]) -> LeasedGroups:
        """Return a lease with groups beyond `yielded`, or with all of the step's."""
        await self._wait_until_awake()
        began, asleep = self._mesh.clock.monotonic(), 0.0
        answer = await self._try_lease(step, yielded)
        while answer.wait is not None and not answer.groups:
            on, is_paused = (
                answer.wait.shard or shard_name(self._job, 0),
                self._mesh.job_clock.is_paused,
            )
            # A new wait begins after a sleep or a pause; a pause counts as no wait.
            with nullcontext() if is_paused else self._mesh.wait("ready groups", on):
                while answer.wait is not None and not answer.groups:
                    await self._mesh.clock.sleep(PAUSED_POLL_S if is_paused else POLL_S)
                    if not self.is_awake.is_set() or self._mesh.job_clock.is_paused != is_paused:
                        break
                    answer = await self._try_lease(step, yielded)
            asleep += await self._wait_until_awake()
        self.waited_s += self._mesh.clock.monotonic() - began - asleep
        return answer

    async def _wait_until_awake(self) -> float:
        began = self._mesh.clock.monotonic()
        await self.is_awake.wait()
        return self._mesh.clock.monotonic() - began

    async def _try_lease(self, step: int, yielded: set[int]) -> LeasedGroups:
        mesh = self._mesh
        return await retry(
            mesh.clock,
            lambda: lease_groups(mesh.state, self._job, mesh.name, mesh.token, step, yielded),
        )

    async def _return_group(
        self, transition: Callable[..., Awaitable[object]], row: GroupRow, *arguments: str
    ) -> None:
        """Record a group's transition; the last argument names the operation."""
        mesh = self._mesh
        order = mesh.state, self._job, mesh.name, mesh.token, row.group, *arguments
        await retry(mesh.clock, lambda: transition(*order))

    async def _fetch_group(self, row: GroupRow) -> TrajectoryGroup | None:
        try:
            about = self._mesh, self._bulk, row.digest, f"group {row.group}"
            content = await fetch_chunk(*about, job=self._job, space=GROUPS)
            return replace(
                validate_group(unpack(TrajectoryGroup, content)),
                abandoned_above=row.abandoned_above,
            )
        except (NotFound, CorruptData, BadMessage) as error:
            self._mesh.telemetry.log.error("group", group=row.group, error=str(error))
            return None
