"""A job on a rollout shard: admits prompts, runs their trajectories, hands in finished groups."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from typing import Any

import numpy as np

from meshrl.common.api.stats import ShardStats
from meshrl.common.base.errors import MeshError
from meshrl.common.base.files import damage
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.mesh.runtime.tasks import all_of
from meshrl.common.records.ledger import Kind
from meshrl.common.state import events, jobs, registry
from meshrl.common.state import groups as rows
from meshrl.common.state.pool.demand import measured
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.services.rollout.record.finished_groups import finished_group, hand_in
from meshrl.services.rollout.routing.engine_link import SeenEngine
from meshrl.services.rollout.runner import TrajectoryRunner
from meshrl.services.rollout.samples import Samples
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.services.rollout.worked import SHUT

LOOK_S = 0.5  # how often engines and the job's row are looked at without a hint
GATE_S = 0.1  # how soon a closed gate is tried again
BOUNDS = (32, 64, 96, 128, 192, 256, 512, 1024, 4096, 32768)  # bounds of the lengths' histogram


class Broken:
    """The first error of any task that works for a job: it ends the work of all of them."""

    def __init__(self) -> None:
        self._error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self._error.done():
            self._error.set_exception(error)
            self._error.exception()  # it is told to whoever guards, if anybody does

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait([task, self._error], return_when=asyncio.FIRST_COMPLETED)
            if self._error.done():
                self._error.result()
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])


class ShardJob:
    """The groups of a job that this shard owns."""

    def __init__(self, mesh: Mesh, job: JobData, runner: TrajectoryRunner) -> None:
        self.mesh, self.job, self.config = mesh, job, job.config
        self.train_rows, self.held_out = job.rows("train"), job.rows("held_out")
        self.runner = runner
        self.samples = Samples(mesh, job, runner.transcript)
        self.version = -1  # the job's current one
        self.bulk = BulkClient(mesh)
        self.broken = Broken()
        self.groups_finished = 0
        self._dropped_in_a_row = 0
        self._groups: dict[int, asyncio.Task[None]] = {}
        self.admitting = False  # the job is in its training phase, and this host does not drain
        self._opening = False  # groups are being asked for
        self.lineage = -1  # the job's current lineage
        self._beginning = 0  # its version when the lineage was seen

    def seed_of(self, group: int, member: int) -> int:
        text = f"{self.config.seed}/{group}/{member}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    async def take_over(self) -> None:
        """Claims the shard and goes on with what its predecessor left of the open groups."""
        history = self.runner.history
        if history is not None and history.damage:  # told of once
            then = damage.FATES["lengths"]
            about = "lengths", history.path, history.damage, then
            told = damage.fields(*about, job=self.job.id, aside=history.aside)
            await events.append(self.mesh.state, damage.EVENT, told)
            history.damage = ""
        await self._take_up(await self.runner.ledger.take_over(self.seed_of))

    async def look(self) -> None:
        """Takes in which engines serve this job now; tells what has failed."""
        entries = await registry.entries(self.mesh.state, "engine")
        alive = [e for e in entries if e.alive and e.stats.get("ready")]
        own = {e.name: SeenEngine.of(e) for e in alive if e.stats.get("job") == self.job.id}
        self.runner.router.observe(own)
        self.runner.freed.set()
        if told := self.runner.failures.hopeless:
            await self._fail(told)
        await self.runner.failures.tell()

    def wanted(self) -> int:
        """Groups to ask the gate for: enough for every slot, and one group in reserve."""
        size = self.config.algorithm.group_size
        if self.config.supervised:  # no engine is needed
            return max(0, 2 * self.config.algorithm.groups_per_step - len(self._groups))
        return max(0, -(-(self._room + size) // size)) if self.runner.router.links else 0

    @property
    def _room(self) -> int:
        """Trajectories that would find an engine at once."""
        seats = self.runner.router.capacity - len(self.runner.router.stays)
        return min(seats, self.runner.router.idle)

    def _shut(self, opened: int) -> bool:
        """Whether the gate holds back what there is room for, as it opened so many groups."""
        if opened or not (self.admitting and self.wanted()):
            return False
        return self.config.supervised or self._room > 0

    async def admit_forever(self) -> None:
        """Opens groups as soon as slots free up, as far as the staleness gate allows."""
        while True:
            await self.runner.freed.wait()
            self.runner.freed.clear()
            self._opening = self.admitting and bool(self.wanted())
            if not self._opening:
                self.runner.worked.spent.put(SHUT, 0)
            try:
                opened = await self._admit() if self._opening else 0
                self.runner.worked.spent.put(SHUT, self._opening and self._shut(opened))
            except MeshError as error:
                if not error.retryable:
                    raise
                self.mesh.telemetry.log.warning("admission", error=str(error))
                await self.mesh.clock.sleep(GATE_S)
                # Takes up groups that an admission opened whose reply was lost.
                await patiently(self.mesh.clock, lambda: self._take_up({}))
                opened = 0
            self._opening = False
            if self.admitting and self.wanted():
                if not opened:  # the gate is closed: a commit opens it
                    await self.mesh.clock.sleep(GATE_S)
                self.runner.freed.set()

    @property
    def idle(self) -> bool:
        """Whether no group is under way, nor will be before `admitting` is set again."""
        return not (self.admitting or self._opening or self._groups)

    async def _admit(self) -> int:
        operation = self.mesh.random.token()
        admitted = await rows.admit(
            self.mesh.state, self.job.id, self.mesh.name, self.mesh.token, self.wanted(), operation
        )
        for a in admitted:
            self.start(a, [])
        return len(admitted)

    async def _take_up(self, known: dict[int, list[Trajectory]]) -> None:
        for a in await rows.open_groups(self.mesh.state, self.job.id, self.mesh.name):
            self.start(a, known.get(a.group, []))

    def start(self, admitted: rows.AdmittedGroup, members: list[Trajectory]) -> None:
        group = admitted.group
        self.enter(admitted.lineage, admitted.version)
        version = admitted.version
        if admitted.lineage < self.lineage:  # word of the next one was faster
            version = min(version, self._beginning)
        if group not in self._groups:
            work = self._group(group, admitted.prompt, version, members)
            task = asyncio.create_task(work, name=f"group {group}")
            self._groups[group] = task

            def ended(task: asyncio.Task[None]) -> None:
                self._groups.pop(group, None)
                if not task.cancelled() and (error := task.exception()) is not None:
                    # A group that stops without a fate would be awaited without end: begin again
                    # from the ledger.
                    self.broken.fail(error)

            task.add_done_callback(ended)

    def enter(self, lineage: int, version: int) -> None:
        """The job is in a lineage, at `version`: if it is a new one, only engines that have its
        weights serve from now on, and nobody waits for a version that it may not reach.
        """
        if lineage <= self.lineage:
            return
        self.lineage, self._beginning = lineage, version
        for t in self.runner.active:
            t.version = min(t.version, version)
        self.runner.router.enter(lineage)

    async def _group(self, group: int, prompt: int, version: int, known: list[Trajectory]) -> None:
        size = self.config.algorithm.group_size
        row = self.train_rows[prompt % len(self.train_rows)]
        have = {t.member: t for t in known}
        members = [
            have.get(m) or Trajectory(group, m, prompt, version, self.seed_of(group, m))
            for m in range(size)
        ]
        for t in members:
            t.temperature = self.config.rollout.temperature
            t.version = min(t.version, version)  # the ledger's may be of an abandoned lineage
        await all_of(self._member(t, row) for t in members)
        scored = [t for t in members if t.ending is not None and t.ending.reward is not None]
        if len(scored) >= self.config.min_group:
            message = finished_group(
                group,
                prompt,
                members,
                self.runner.scorer.roles,
                lambda: model_config(self.job).expert_shape,
            )
            await hand_in(self.mesh, self.bulk, self.job.id, message)
            self.runner.worked.groups += 1
            fate = "ready"
            self._dropped_in_a_row = 0
        else:
            reasons = sorted({t.ending.reason for t in members if t.ending} - {"done", "length"})
            await patiently(
                self.mesh.clock,
                lambda: rows.group_dropped(
                    self.mesh.state,
                    self.job.id,
                    self.mesh.name,
                    self.mesh.token,
                    group,
                    ",".join(reasons),
                    f"drop-{group}",
                ),
            )
            fate = "dropped"
            # Once all that the gate lets through at a time has failed, its code is broken for ever.
            self._dropped_in_a_row += 1
            algorithm = self.config.algorithm
            if self._dropped_in_a_row >= algorithm.groups_per_step * (algorithm.max_staleness + 1):
                errors = [t.ending.error for t in members if t.ending and t.ending.error]
                failed = f"all of the last {self._dropped_in_a_row} groups failed"
                await self._fail(f"{failed}; the last one: {errors[-1]}")
        self.groups_finished += 1
        await self.runner.ledger.log((Kind.CLOSE, [group, fate]))
        await patiently(self.mesh.clock, lambda: self.runner.ledger.forget(group))

    async def _fail(self, told: str) -> None:
        await self.runner.failures.close()
        await enter_phase(self.mesh, self.job.id, jobs.Phase.FAILED, told)

    async def _member(self, t: Trajectory, row: dict[str, Any]) -> None:
        known = t.ending is not None  # from the ledger
        await self.runner.train(t, row)
        if not known:
            self.samples.ended(t, row, self.version)

    def stats(self) -> ShardStats:
        active = self.runner.active
        lengths = np.array([t.length for t in active] or [0])
        histogram = np.histogram(lengths, (0, *BOUNDS, 1 << 40))[0] if active else np.zeros(0)
        runner, lengths_of_ended = self.runner, self.runner.worked.lengths
        return ShardStats(
            **runner.router.stats.encoded(),
            in_flight=len(active),
            waiting=runner.router.waiting,
            bounds=list(BOUNDS),
            histogram=[int(n) for n in histogram],
            tokens=runner.commits.sampled,
            groups=self.groups_finished,
            work=measured.told(runner.worked.work(runner.commits.recorded)),
            lengths=lengths_of_ended.told() if lengths_of_ended is not None else None,
            environments=runner.environments.pids,
            environments_stopped=runner.environments.stopped(),
        )

    async def close(self) -> None:
        """Leaves what is in flight to the ledger."""
        await self.runner.failures.close()
        tasks = list(self._groups.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.samples.close()
        await self.runner.close()


async def enter_phase(
    mesh: Mesh, job: str, phase: jobs.Phase, why: str = "", lineage: int | None = None
) -> None:
    await patiently(
        mesh.clock,
        lambda: jobs.set_phase(mesh.state, job, phase, mesh.token, mesh.name, why, lineage),
    )
