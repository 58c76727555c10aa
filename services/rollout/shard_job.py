"""Job on a rollout shard: it admits prompts, runs their trajectories, and submits finished
groups.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import numpy as np

from meshrl.common.api.stats import ShardStats
from meshrl.common.base.errors import MeshError
from meshrl.common.base.files import corruption
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.job.prompt_order import PromptMix, PromptOrder
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.records.ledger import RecordKind
from meshrl.common.state import events, jobs, registry
from meshrl.common.state import groups as rows
from meshrl.common.state.pool.demand import measurements
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.services.rollout.record.finished_groups import build_group, submit_group
from meshrl.services.rollout.routing.engine_link import EngineSnapshot
from meshrl.services.rollout.runner import TrajectoryRunner
from meshrl.services.rollout.sample_writer import SampleWriter
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.services.rollout.work_counters import GATE_CLOSED

POLL_S = 0.5  # interval of polls of engines and the job's row without a hint
GATE_RETRY_S = 0.1  # interval of retries at a closed gate
LENGTH_BOUNDS = (
    32,
    64,
    96,
    128,
    192,
    256,
    512,
    1024,
    4096,
    32768,
)  # bounds of the lengths' histogram


class FirstError:
    """First error of any background task of a job; it cancels the guarded coroutine."""

    def __init__(self) -> None:
        self._error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        """Record an error unless another one is already recorded."""
        if not self._error.done():
            self._error.set_exception(error)
            self._error.exception()  # reported to the guard, if there is one

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or an error is recorded; then cancel `work` and raise that
        error.

        Errors of `work` itself are raised too.
        """
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
    """Job on one shard: it owns the groups that the shard admitted, and a task for each."""

    def __init__(self, mesh: Mesh, job: JobData, runner: TrajectoryRunner) -> None:
        self.mesh, self.job, self.config = mesh, job, job.config
        sources = job.read_training_sources()
        self.train_rows = list(chain.from_iterable(sources))
        self.held_out = job.read_rows("held_out")
        self.prompt_order = PromptOrder(
            PromptMix.from_job(job.config),
            [len(rows) for rows in sources],
            shuffles=job.config.dataset.shuffle,
        )
        self.runner = runner
        self.samples = SampleWriter(mesh, job, runner.transcript)
        self.version = -1  # the job's current version
        self.bulk_client = BulkClient(mesh)
        self.first_error = FirstError()
        self.groups_finished = 0
        self._consecutive_drops = 0
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self.admission_open = (
            False  # the job is in its training phase, and this host does not drain
        )
        self._is_admitting = False  # an admission request is in progress
        self.lineage = -1  # the job's current lineage
        self._lineage_start_version = 0  # its version when the lineage was first seen

    def compute_seed(self, group: int, member: int) -> int:
        """Derive the sampling seed of a trajectory, a 63-bit integer, from the job's seed."""
        text = f"{self.config.seed}/{group}/{member}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    async def take_over(self) -> None:
        """Claim the shard's ledger, and start the groups that an earlier process left open.

        A corrupt file of lengths is reported as an event.
        """
        history = self.runner.history
        if history is not None and history.corruption:  # reported once
            recovery = corruption.RECOVERY_BY_KIND["lengths"]
            corrupt_file = "lengths", history.path, history.corruption, recovery
            event_fields = corruption.make_event_fields(
                *corrupt_file, job=self.job.id, quarantined_path=history.quarantined_path
            )
            await events.append(self.mesh.state, corruption.CORRUPTION_EVENT, event_fields)
            history.corruption = ""
        await self._resume_open_groups(await self.runner.ledger.take_over(self.compute_seed))

    async def poll_engines(self) -> None:
        """Read the job's ready engines from the registry once, and update the router.

        Record the failures of trajectories in Redis; if they are permanent, fail the job.
        """
        entries = await registry.list_entries(self.mesh.state, "engine")
        alive = [e for e in entries if e.alive and e.stats.get("ready")]
        engines = {
            e.name: EngineSnapshot.from_entry(e) for e in alive if e.stats.get("job") == self.job.id
        }
        self.runner.router.update_engines(engines)
        self.runner.slot_freed.set()
        if reason := self.runner.failures.hopeless_reason:
            await self._fail_job(reason)
        await self.runner.failures.report()

    def count_desired_groups(self) -> int:
        """Count the groups to request from the gate: enough for every slot, and one in reserve.

        Return 0 without an engine. Supervised jobs need none: they prepare groups for two steps.
        """
        size = self.config.algorithm.group_size
        if self.config.is_supervised:  # no engine is needed
            return max(0, 2 * self.config.algorithm.groups_per_step - len(self._group_tasks))
        return max(0, -(-(self._free_slots + size) // size)) if self.runner.router.links else 0

    @property
    def _free_slots(self) -> int:
        """Number of further trajectories that the engines can accept now."""
        free_slots = self.runner.router.capacity - len(self.runner.router.assignments)
        return min(free_slots, self.runner.router.free_requests)

    def _is_gate_closed(self, opened: int) -> bool:
        """Return True if the gate blocks groups despite free capacity, after it opened `opened`
        groups.
        """
        if opened or not (self.admission_open and self.count_desired_groups()):
            return False
        return self.config.is_supervised or self._free_slots > 0

    async def admit_forever(self) -> None:
        """Open groups as slots become free, as far as the staleness gate allows.

        Retryable errors are logged and retried; others are raised.
        """
        while True:
            await self.runner.slot_freed.wait()
            self.runner.slot_freed.clear()
            self._is_admitting = self.admission_open and bool(self.count_desired_groups())
            if not self._is_admitting:
                self.runner.work_counters.occupancy.set_count(GATE_CLOSED, 0)
            try:
                opened = await self._admit() if self._is_admitting else 0
                self.runner.work_counters.occupancy.set_count(
                    GATE_CLOSED, self._is_admitting and self._is_gate_closed(opened)
                )
            except MeshError as error:
                if not error.retryable:
                    raise
                self.mesh.telemetry.log.warning("admission", error=str(error))
                await self.mesh.clock.sleep(GATE_RETRY_S)
                # Continues groups of an admission whose reply was lost.
                await retry(self.mesh.clock, lambda: self._resume_open_groups({}))
                opened = 0
            self._is_admitting = False
            if self.admission_open and self.count_desired_groups():
                if not opened:  # the gate is closed: a commit opens it
                    await self.mesh.clock.sleep(GATE_RETRY_S)
                self.runner.slot_freed.set()

    @property
    def is_idle(self) -> bool:
        """True if no group is in progress, and none can start before `admission_open` is set."""
        return not (self.admission_open or self._is_admitting or self._group_tasks)

    async def _admit(self) -> int:
        """Request groups from the gate, start a task for each, and return their number."""
        operation = self.mesh.random.hex_token()
        admitted = await rows.admit_groups(
            self.mesh.state,
            self.job.id,
            self.mesh.name,
            self.mesh.token,
            self.count_desired_groups(),
            operation,
        )
        for a in admitted:
            self.start_group(a, [])
        return len(admitted)

    async def _resume_open_groups(self, restored: dict[int, list[Trajectory]]) -> None:
        """Start a task for each group that Redis records as open on this shard.

        `restored` has the trajectories from the ledger, by group.
        """
        for a in await rows.read_open_groups(self.mesh.state, self.job.id, self.mesh.name):
            self.start_group(a, restored.get(a.group, []))

    def start_group(self, admitted: rows.AdmittedGroup, members: list[Trajectory]) -> None:
        """Start a task that runs a group, unless one runs already; enter the group's lineage first.

        `members` are restored trajectories; missing ones start from the prompt. An error of the
        task becomes `first_error`.
        """
        group = admitted.group
        self.enter_lineage(admitted.lineage, admitted.version)
        version = admitted.version
        if admitted.lineage < self.lineage:  # the notice of the next lineage was faster
            version = min(version, self._lineage_start_version)
        if group not in self._group_tasks:
            coroutine = self._run_group(group, admitted.prompt, version, members)
            task = asyncio.create_task(coroutine, name=f"group {group}")
            self._group_tasks[group] = task

            def on_done(task: asyncio.Task[None]) -> None:
                self._group_tasks.pop(group, None)
                if not task.cancelled() and (error := task.exception()) is not None:
                    # A group that stops without a result would be awaited forever: recover
                    # it from the ledger.
                    self.first_error.fail(error)

            task.add_done_callback(on_done)

    def enter_lineage(self, lineage: int, version: int) -> None:
        """Enter a later lineage at `version`; ignore the current and earlier ones.

        From then on only engines with weights of that lineage serve. No trajectory waits for a
        version that the lineage may not reach.
        """
        if lineage <= self.lineage:
            return
        self.lineage, self._lineage_start_version = lineage, version
        for t in self.runner.active_trajectories:
            t.version = min(t.version, version)
        self.runner.router.enter_lineage(lineage)

    async def _run_group(
        self, group: int, prompt: int, version: int, restored: list[Trajectory]
    ) -> None:
        """Run all members of a group, then submit the group, or drop it if too few have a reward.

        If all groups in flight are dropped in a row, fail the job.
        """
        size = self.config.algorithm.group_size
        row_number = self.prompt_order.find_row(prompt)
        row = self.train_rows[row_number]
        restored_by_member = {t.member: t for t in restored}
        members = [
            restored_by_member.get(m)
            or Trajectory(group, m, prompt, version, self.compute_seed(group, m))
            for m in range(size)
        ]
        for t in members:
            t.row, t.temperature = row_number, self.config.rollout.temperature
            t.top_p = self.config.rollout.top_p
            # the ledger's version may be of an abandoned lineage
            t.version = min(t.version, version)
        recorded = next((t.group_rewards for t in restored if t.group_rewards is not None), None)
        async with score_over_groups(self, [(members, row)], recorded):
            await run_all(self._run_member(t, row) for t in members)
        scored = [t for t in members if t.outcome is not None and t.outcome.reward is not None]
        if len(scored) >= self.config.min_group:
            message = build_group(
                group,
                prompt,
                members,
                self.runner.scoring_client.roles,
                lambda: load_model_config(self.job).routing_shape,
            )
            await submit_group(self.mesh, self.bulk_client, self.job.id, message)
            self.runner.work_counters.groups += 1
            result = "ready"
            self._consecutive_drops = 0
        else:
            reasons = sorted({t.outcome.reason for t in members if t.outcome} - {"done", "length"})
            await retry(
                self.mesh.clock,
                lambda: rows.drop_group(
                    self.mesh.state,
                    self.job.id,
                    self.mesh.name,
                    self.mesh.token,
                    group,
                    ",".join(reasons),
                    f"drop-{group}",
                ),
            )
            result = "dropped"
            # If all concurrent trajectories have failed, the code is permanently broken.
            self._consecutive_drops += 1
            algorithm = self.config.algorithm
            if self._consecutive_drops >= algorithm.groups_per_step * (algorithm.max_staleness + 1):
                errors = [t.outcome.error for t in members if t.outcome and t.outcome.error]
                summary = f"all of the last {self._consecutive_drops} groups failed"
                await self._fail_job(f"{summary}; last error: {errors[-1]}")
        self.groups_finished += 1
        await self.runner.ledger.write_records((RecordKind.CLOSE, [group, result]))
        await retry(self.mesh.clock, lambda: self.runner.ledger.forget_group(group))

    async def _fail_job(self, reason: str) -> None:
        """Report the remaining failures, and set the job's phase to failed."""
        await self.runner.failures.close()
        await set_job_phase(self.mesh, self.job.id, jobs.Phase.FAILED, reason)

    async def _run_member(self, trajectory: Trajectory, row: dict[str, Any]) -> None:
        is_restored = trajectory.outcome is not None  # from the ledger
        await self.runner.run_training(trajectory, row)
        if not is_restored:
            self.samples.write_training_sample(trajectory, row, self.version)

    def stats(self) -> ShardStats:
        """Return the shard's counters and the histogram of current trajectory lengths in tokens."""
        active = self.runner.active_trajectories
        lengths = np.array([t.length for t in active] or [0])
        histogram = (
            np.histogram(lengths, (0, *LENGTH_BOUNDS, 1 << 40))[0] if active else np.zeros(0)
        )
        runner, finished_lengths = self.runner, self.runner.work_counters.length_summary
        return ShardStats(
            **runner.router.stats.encode(),
            in_flight=len(active),
            waiting=runner.router.queue_length,
            bounds=list(LENGTH_BOUNDS),
            histogram=[int(n) for n in histogram],
            tokens=runner.group_commit.sampled_tokens,
            groups=self.groups_finished,
            work=measurements.encode_work(
                runner.work_counters.measure_work(runner.group_commit.recorded_tokens)
            ),
            lengths=finished_lengths.encode() if finished_lengths is not None else None,
            environments=runner.environment_pool.pids,
            environments_stopped=runner.environment_pool.list_stopped(),
        )

    async def close(self) -> None:
        """Cancel the groups' tasks and close the runner; groups in flight remain in the ledger."""
        await self.runner.failures.close()
        tasks = list(self._group_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.samples.close()
        await self.runner.close()


@asynccontextmanager
async def score_over_groups(
    shard: ShardJob,
    groups: Iterable[tuple[Sequence[Trajectory], dict[str, Any]]],
    recorded: Mapping[int, Any] | None = None,
) -> AsyncIterator[None]:
    """Give the members of groups the scorers that a reward over groups needs, within the block.

    `recorded`: rewards of the only group, from the ledger.
    """
    scorers = []
    if shard.config.reward.over_group:
        create = shard.runner.create_group_scorer
        scorers = [create(members, row, recorded) for members, row in groups]
    try:
        yield
    finally:
        for scorer in scorers:
            await scorer.close()


async def set_job_phase(
    mesh: Mesh, job: str, phase: jobs.Phase, reason: str = "", lineage: int | None = None
) -> None:
    """Move a job to a later phase in Redis; retry while Redis is unavailable.

    Raises Fenced without this process's lease, and Refused for an earlier phase. With `lineage`, do
    nothing if the job has left that lineage.
    """
    await retry(
        mesh.clock,
        lambda: jobs.set_phase(mesh.state, job, phase, mesh.token, mesh.name, reason, lineage),
    )
