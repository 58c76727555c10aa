"""Steps of a virtual job on record, and the shard that opens and finishes its groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshrl.common.mesh.runtime.calls.actor import Actor
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import groups, jobs, steps
from meshrl.common.state.pool.workers.placement import Placement, build_parser

T = TypeVar("T")
GROUP_S = 0.5  # of generation for a group


class JobSteps:
    """Steps of a job on record, as its only process commits them."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job

    async def start(self) -> int:
        """Start the job if it is queued; return its committed version."""
        mesh, job = self._mesh, self._job
        row = await repeat(mesh, jobs.read_job, mesh.state, job)
        if row.phase == jobs.Phase.QUEUED:
            first = steps.VersionReferences("m0", "c0")
            fence = mesh.state, job, mesh.name, mesh.token
            await repeat(mesh, steps.commit_initial, *fence, 0, first)
            where = mesh.state, job, jobs.Phase.TRAINING, mesh.token, mesh.name
            await repeat(mesh, jobs.set_phase, *where)
            row = await repeat(mesh, jobs.read_job, mesh.state, job)
        return row.version

    async def lease(self, step: int) -> list[int]:
        """Lease all groups of a step."""
        mesh, leased = self._mesh, list[int]()
        while True:
            about = mesh.state, self._job, mesh.name, mesh.token, step, list(leased)
            answer = await repeat(mesh, groups.lease_groups, *about)
            leased += [row.group for row in answer.groups]
            if answer.wait is None:
                return leased
            await mesh.clock.sleep(0.5)

    async def commit(self, step: int, leased: Sequence[int]) -> None:
        """Commit a step with the groups that are leased for it."""
        mesh, references = self._mesh, steps.VersionReferences(f"m{step}", f"c{step}")
        commit = steps.StepCommit(step, leased, (), references, {}, {}, step - 1)
        fence = mesh.state, self._job, mesh.name, mesh.token, 0
        await repeat(mesh, steps.commit_step, *fence, commit)
        await repeat(mesh, steps.record_checkpoint, *fence, step, references.checkpoint)


@dataclass
class Generation:
    """Seconds of generation for the groups of a job."""

    wanted_s: float = 0.0
    generated_s: float = 0.0  # infinity: groups need none
    finished_s: float = 0.0


class Shard(Actor):
    """Shard that opens groups, and finishes them when engines have generated for long enough."""

    def __init__(self, mesh: Mesh, job: str, generation: Generation) -> None:
        self.mesh, self.job, self._generation, self._operations = mesh, job, generation, 0

    def _name_operation(self) -> str:
        self._operations += 1
        return f"{self.mesh.incarnation} {self._operations}"

    async def run(self) -> None:
        mesh, seconds = self.mesh, self._generation
        await mesh.join(self, stats=lambda: {"job": self.job})
        mesh.ready = True
        fence = mesh.state, self.job, mesh.name, mesh.token
        await repeat(mesh, groups.claim_shard, *fence)
        found = await repeat(mesh, groups.read_open_groups, *fence[:3])
        while True:
            found += await repeat(mesh, groups.admit_groups, *fence, 3, self._name_operation())
            seconds.wanted_s = seconds.finished_s + GROUP_S * len(found)
            while found and seconds.generated_s >= seconds.finished_s + GROUP_S:
                group = found.pop(0)
                seconds.finished_s += GROUP_S
                done = groups.FinishedGroup(group.group, f"{group.group}", 10, group.version, 3)
                await repeat(mesh, groups.mark_group_ready, *fence, done, self._name_operation())
            await mesh.clock.sleep(1.0)


def parse_placement(argv: list[str]) -> Placement:
    """Return the placement of a role process from its arguments."""
    return Placement.from_args(build_parser(None).parse_args(argv))


async def repeat(mesh: Mesh, operation: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Repeat an idempotent operation on Redis until it is answered."""
    return await retry(mesh.clock, lambda: operation(*args))
