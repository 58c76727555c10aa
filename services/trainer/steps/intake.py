"""Leases the groups of a step as they become ready, and fetches their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from meshrl.common.api.transfer.bulk import GROUPS
from meshrl.common.api.weights import Group
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.base.errors import BadMessage, Damaged, NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state.groups import (
    GroupRow,
    LeasedGroups,
    group_filtered,
    group_requeued,
    group_stale,
    lease_groups,
)
from meshrl.common.state.pool.workers.names import shard
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.store.weight_store import get
from meshrl.services.trainer.steps.batch import whole

POLL_S = 0.03  # how often ready groups are looked for,
PAUSED_POLL_S = 0.5  # and while the job is paused
LOOK_S = 60.0  # deadline of a look at one group's rewards


class Intake:
    def __init__(self, mesh: Mesh, bulk: BulkClient, job: str) -> None:
        self._mesh, self._bulk, self._job = mesh, bulk, job
        self.waited_s = 0.0  # seconds of waiting for groups, over all steps, and not asleep
        self.awake = asyncio.Event()  # no group is leased while it is not set
        self.awake.set()

    async def groups(
        self,
        step: int,
        stale: Callable[[Group], bool],
        replaced: Callable[[Group], bool] = lambda group: False,
    ) -> AsyncIterator[Group]:
        """Each group of the step once, as soon as it may train.

        One whose bytes are gone, garbled or do not fit together, or whose tokens are staler than
        its row says, goes back, and another takes its place; so does one that is `replaced`, which
        ends.
        """
        given, log = set[int](), self._mesh.telemetry.log
        while True:
            leased = await self._lease(step, given)
            for row, group in zip(leased.groups, await self.contents(leased.groups), strict=True):
                if group is None:
                    reason = "poisoned"
                    log.error("group given back", group=row.group, reason=reason)
                    await self._give_up(group_requeued, row, reason, f"{reason}-{row.group}")
                elif stale(group):
                    log.error("group is staler than its row", group=row.group)
                    await self._give_up(group_stale, row, f"stale-{row.group}")
                elif await self._mesh.host.run_blocking(replaced, group, deadline_s=LOOK_S):
                    await self._give_up(group_filtered, row, f"filtered-{row.group}")
                else:
                    given.add(row.group)
                    yield group
            if leased.waiting is None and given.issuperset(row.group for row in leased.groups):
                return

    async def contents(self, rows: Sequence[GroupRow]) -> list[Group | None]:
        return list(await asyncio.gather(*(self._content(row) for row in rows)))

    async def _lease(self, step: int, given: set[int]) -> LeasedGroups:
        """A lease that holds groups beyond `given`, or all of the step's."""
        await self._until_awake()
        began, asleep = self._mesh.clock.monotonic(), 0.0
        answer = await self._try_lease(step, given)
        while answer.waiting is not None and not answer.groups:
            on, held = answer.waiting.on or shard(self._job, 0), self._mesh.job_clock.held
            # Waited for anew after a sleep or a pause; in a pause there is no wait.
            with nullcontext() if held else self._mesh.wait("ready groups", on):
                while answer.waiting is not None and not answer.groups:
                    await self._mesh.clock.sleep(PAUSED_POLL_S if held else POLL_S)
                    if not self.awake.is_set() or self._mesh.job_clock.held != held:
                        break
                    answer = await self._try_lease(step, given)
            asleep += await self._until_awake()
        self.waited_s += self._mesh.clock.monotonic() - began - asleep
        return answer

    async def _until_awake(self) -> float:
        began = self._mesh.clock.monotonic()
        await self.awake.wait()
        return self._mesh.clock.monotonic() - began

    async def _try_lease(self, step: int, given: set[int]) -> LeasedGroups:
        mesh = self._mesh
        return await patiently(
            mesh.clock,
            lambda: lease_groups(mesh.state, self._job, mesh.name, mesh.token, step, given),
        )

    async def _give_up(
        self, how: Callable[..., Awaitable[object]], row: GroupRow, *about: str
    ) -> None:
        """Writes down what becomes of a group; the last of `about` names the operation."""
        mesh = self._mesh
        order = mesh.state, self._job, mesh.name, mesh.token, row.group, *about
        await patiently(mesh.clock, lambda: how(*order))

    async def _content(self, row: GroupRow) -> Group | None:
        try:
            about = self._mesh, self._bulk, row.digest, f"group {row.group}"
            content = await get(*about, job=self._job, space=GROUPS)
            return replace(whole(unpack(Group, content)), foreign_above=row.foreign_above)
        except (NotFound, Damaged, BadMessage) as error:
            self._mesh.telemetry.log.error("group", group=row.group, error=str(error))
            return None
