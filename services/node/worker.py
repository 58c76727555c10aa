"""A worker of a gang: it makes its processes match the gang's record, and reports what runs.

It imports no model code: role processes, its children, do. It lives on when the agent dies, and
ends itself when no agent of its host has held its lease for a minute, or Redis was unreachable that
long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path
from typing import Any

from common.api.hint import Look
from common.api.node import Worker
from common.errors import DeadlineExceeded, StateUnavailable
from common.runtime.actor import Actor, cast
from common.runtime.mesh import Mesh, MeshSettings, run
from common.state import registry
from common.state.gangs import Gang, Role, gang, join_gang, report_actual
from services.node.roleprocess import RoleProcess
from services.node.roles import Assignment, with_overrides

LOOK_S = 0.5  # between two looks at the record; a hint, or the end of its process, comes earlier
STARTING_LOOK_S = 0.1  # while a role process starts: its readiness is news
AGENT_LOOK_S = 2.0
ORPHAN_S = 60.0
ANSWER_S = 5.0  # for one look; Redis is restarted in less
LEAVE_S = 3.0  # to give the name back


class GangWorker(Actor):
    interface = Worker

    def __init__(
        self,
        mesh: Mesh,
        gang_id: str,
        accelerator: str,
        role: RoleProcess,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._mesh, self._gang, self._accelerator, self._role = mesh, gang_id, accelerator, role
        self._rank, self._ranks = rank, ranks
        self._news = role.changed
        self._reported: tuple[Any, ...] = ()

    def stats(self) -> dict[str, Any]:
        running = self._role.assignment
        return {
            "gang": self._gang,
            "rank": self._rank,
            "accelerator": self._accelerator,
            "role": running.role if running else Role.IDLE,
            "job": running.job if running else "",
            "epoch": running.epoch if running else 0,
            "state": self._role.state,
            "role_pid": self._role.pid,
            "role_restarts": self._role.restarts,
        }

    @cast(Worker.look)
    def look(self, m: Look) -> None:
        self._news.set()

    async def reconcile(self) -> None:
        """Looks at the record for ever. A look that Redis does not answer changes nothing."""
        while True:
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._look_once()
            pause_s = STARTING_LOOK_S if self._role.state == "starting" else LOOK_S
            with contextlib.suppress(DeadlineExceeded):
                async with self._mesh.clock.timeout(pause_s, "a hint"):
                    await self._news.wait()
            self._news.clear()

    async def _look_once(self) -> None:
        record = await self._record()
        wanted = Assignment.of(record, self._rank)
        running = self._role.assignment
        if wanted.role == Role.IDLE:
            if running is not None:
                await self._give_up_role(record, f"idle from epoch {record.epoch}")
        elif running != wanted:
            if running is not None:
                await self._give_up_role(record, f"{wanted.role} from epoch {record.epoch}")
            await self._report(record, wanted.role, "starting", "")
            await self._role.start(wanted)
        await self._role.look()
        now = self._role.assignment
        await self._report(
            record, now.role if now else Role.IDLE, self._role.state, self._role.detail
        )

    async def _record(self) -> Gang:
        found = await gang(self._mesh.state, self._gang)
        if found is None or self._mesh.name not in found.workers:
            return await self.join()
        return found

    async def join(self) -> Gang:
        mesh = self._mesh
        return await join_gang(
            mesh.state, self._gang, mesh.name, mesh.token, self._accelerator, self._ranks
        )

    async def _give_up_role(self, record: Gang, reason: str) -> None:
        running = self._role.assignment
        await self._report(record, running.role if running else Role.IDLE, "draining", reason)
        await self._role.stop(reason)

    async def _report(self, record: Gang, role: Role, state: str, detail: str) -> None:
        """Writes what runs by compare-and-set on the epoch: the record of a later decision is left
        alone.
        """
        news = (record.epoch, role, state, detail)
        on_record = (record.actual_epoch, record.actual_role, record.actual_state)
        if news == self._reported and on_record == (record.epoch, role, state):
            return
        mesh = self._mesh
        if await report_actual(
            mesh.state, self._gang, mesh.token, record.epoch, role, state, detail
        ):
            self._reported = news

    async def until_orphaned(self, orphan_s: float) -> str:
        """Returns, with the reason, when this host has had no agent, or no Redis, for so long."""
        mesh = self._mesh
        agent = f"node/{mesh.settings.host}"
        without_agent_s = without_redis_s = 0.0
        before = mesh.clock.monotonic()
        while True:
            try:
                async with mesh.clock.timeout(ANSWER_S, "a look for the agent"):
                    entry = await registry.lookup(mesh.state, agent)
                there, answered = entry is not None and entry.alive, True
            except (StateUnavailable, DeadlineExceeded):
                there = answered = False
            now = mesh.clock.monotonic()
            elapsed_s, before = now - before, now
            without_redis_s = 0.0 if answered else without_redis_s + elapsed_s
            if answered:  # while Redis is away nobody can tell
                without_agent_s = 0.0 if there else without_agent_s + elapsed_s
            if without_redis_s > orphan_s:
                return f"Redis has not answered for {orphan_s:g} s"
            if without_agent_s > orphan_s:
                return f"{agent} has held no lease for {orphan_s:g} s"
            await mesh.clock.sleep(min(AGENT_LOOK_S, orphan_s / 4))


def worker_name(gang: str, rank: int) -> str:
    """The first of a gang is called as the gang is."""
    return f"worker/{gang}.{rank}" if rank else f"worker/{gang}"


async def main(a: argparse.Namespace) -> None:
    await serve(await Mesh.open(worker_name(a.gang, a.rank), "worker", MeshSettings.from_env()), a)


async def serve(mesh: Mesh, a: argparse.Namespace) -> None:
    """The life of a worker, until it is an orphan or cancelled."""
    logs = Path(mesh.settings.run_root) / "mesh" / "logs"
    role = RoleProcess(mesh, a.gang, with_overrides(a.role_command), logs)
    worker = GangWorker(mesh, a.gang, a.accelerator, role, a.rank, a.ranks)
    try:
        await mesh.join(worker, stats=worker.stats)
        await worker.join()
        mesh.ready = True
        orphaned = asyncio.create_task(worker.until_orphaned(a.orphan_s))
        tasks = [
            orphaned,
            asyncio.create_task(worker.reconcile()),
            asyncio.create_task(role.leases.run()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                why = await task
                mesh.telemetry.log.warning("worker ends", why=why)
    finally:
        await role.stop("the worker ends", leaving=True)
        with contextlib.suppress(DeadlineExceeded):
            async with mesh.clock.timeout(LEAVE_S, "leaving"):
                await mesh.leave()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--gang", required=True)
    found.add_argument("--accelerator", default="cpu:0")
    found.add_argument("--rank", type=int, default=0, help="of the worker in its gang")
    found.add_argument("--ranks", type=int, default=1, help="workers of the gang")
    found.add_argument("--role-command", action="append", default=[], metavar="ROLE=COMMAND")
    found.add_argument("--orphan-s", type=float, default=ORPHAN_S)
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
