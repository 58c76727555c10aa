"""A job on a rollout shard: admits prompts, runs their trajectories, hands in finished groups."""

from __future__ import annotations

import asyncio
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from common.api.engine import Finish, Sampling
from common.errors import ConfigError, MeshError, ToolFailed
from common.job.job_data import JobData
from common.job.model_shape import model_config
from common.model.tokenizer import Tokenizer
from common.pool import measured
from common.records import damage
from common.records.ledger import Kind
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.runtime.tasks import all_of
from common.state import events, jobs, registry
from common.state import groups as rows
from common.wire.bulk.port import BulkClient
from services.rollout.broken import Broken
from services.rollout.environments.pool import EnvironmentPool
from services.rollout.record.finished_groups import finished_group, hand_in
from services.rollout.record.group_commit import GroupCommit
from services.rollout.record.shard_ledger import ShardLedger
from services.rollout.rewards.judge import judge_of
from services.rollout.rewards.sandboxes import SandboxClient
from services.rollout.rewards.scoring import Scorer
from services.rollout.routing.cmlfq import Scheduler
from services.rollout.routing.length_history import LengthHistory
from services.rollout.routing.lengths import Lengths
from services.rollout.routing.queues import LengthBucket
from services.rollout.routing.router import Router
from services.rollout.routing.stay import Stay
from services.rollout.samples import Samples
from services.rollout.supervised import supervise
from services.rollout.timing import TrajectoryTimes
from services.rollout.trajectories.buffers import NOT_SAMPLED
from services.rollout.trajectories.failures import Failures, TrajectoryFailed
from services.rollout.trajectories.trajectory import Ending, Trajectory, Turn
from services.rollout.trajectories.transcript import Transcript
from services.rollout.worked import IN_FLIGHT, SHUT, Worked

LOOK_S = 0.5  # how often engines and the job's row are looked at without a hint
GATE_S = 0.1  # how soon a closed gate is tried again
BOUNDS = (32, 64, 96, 128, 192, 256, 512, 1024, 4096, 32768)  # bounds of the lengths' histogram
CALLS = 1024  # most tool calls in a turn: an environment that asks for more does not end
EVALUATION_GROUP = 1 << 40  # evaluation's groups are numbered from here, off the books


class ShardJob:
    """The trajectories of a job that this shard owns.

    Training trajectories are in the ledger before their tokens count; evaluation's start over when
    the shard does.
    """

    def __init__(self, mesh: Mesh, job: JobData, logs: Path) -> None:
        config = job.config
        self.mesh, self.job, self.config = mesh, job, config
        self.train_rows, self.held_out = job.rows("train"), job.rows("held_out")
        sampling = self._sampling()
        self.failures = Failures(mesh, job.id)
        self.sandbox = SandboxClient(mesh, job, self.failures)
        self.environments = EnvironmentPool(mesh, job, logs, self.failures)
        self.ledger = ShardLedger(mesh, job)
        buckets = self._buckets()
        follows = not config.rollout.buckets and len(set(config.rollout.tensor_parallel)) > 1
        self.history = (
            LengthHistory(mesh.host, self.ledger.directory, root=job.here)
            if len(buckets) > 1 or follows
            else None
        )
        lengths = Lengths(self.history.latest if self.history else ())
        scheduler = Scheduler(buckets, len(self.train_rows), lengths, follows)
        self.commits = GroupCommit(mesh, self.ledger)
        self.router = Router(mesh, self.commits, sampling, config.rollout.slots, scheduler)
        tokenizer = Tokenizer.load(str(job.tokenizer))
        self.transcript = Transcript(tokenizer.decode, self.router.stop, config.rollout.stop_text)
        self.samples = Samples(mesh, job, self.transcript)
        self.times = TrajectoryTimes(mesh, job)
        self.version = -1  # the job's current one
        self.bulk = BulkClient(mesh)
        self.scorer = Scorer(mesh, job)
        self.judge = judge_of(mesh, job, self.scorer)
        self.broken = Broken()
        self.groups_finished = 0
        self.worked = Worked(self.router.spent)
        self._dropped_in_a_row = 0
        self._groups: dict[int, asyncio.Task[None]] = {}
        self.hungry = asyncio.Event()
        self.admitting = False  # the job is in its training phase, and this host does not drain
        self._opening = False  # groups are being asked for
        self.lineage = -1  # the job's current lineage
        self._beginning = 0  # its version when the lineage was seen

    def _sampling(self) -> Sampling:
        rollout = self.config.rollout
        forced = bool(rollout.lengths)  # then nothing else ends a turn
        return Sampling(
            stop=[] if forced else self._stop_ids(),
            stop_text=[] if forced else rollout.stop_text,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
        )

    def _buckets(self) -> list[LengthBucket]:
        rollout = self.config.rollout
        if not rollout.buckets:
            return [LengthBucket(rollout.max_tokens, rollout.slots)]
        return [LengthBucket(b.max_tokens, b.batch, b.engines) for b in rollout.buckets]

    def _stop_ids(self) -> list[int]:
        tokenizer = Tokenizer.load(str(self.job.tokenizer))
        found = {text: tokenizer.token_to_id(text) for text in self.config.rollout.stop}
        unknown = [text for text, token in found.items() if token is None]
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is no token of the tokenizer",
                where="rollout.stop",
                fix="name one of its tokens, or put the text into rollout.stop_text",
            )
        return [token for token in found.values() if token is not None]

    def seed_of(self, group: int, member: int) -> int:
        text = f"{self.config.seed}/{group}/{member}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    async def take_over(self) -> None:
        """Claims the shard and goes on with what its predecessor left of the open groups."""
        await self._tell_of_lengths()
        known = await self.ledger.take_over(self.seed_of)
        for a in await rows.open_groups(self.mesh.state, self.job.id, self.mesh.name):
            self.start(a, known.get(a.group, []))

    async def _tell_of_lengths(self) -> None:
        """Says once that lengths of past trajectories were damaged."""
        if self.history is None or not self.history.damage:
            return
        then, why = damage.FATES["lengths"].then, self.history.damage
        path, aside = self.history.path, self.history.aside
        told = damage.fields("lengths", path, why, then, job=self.job.id, aside=aside)
        await events.append(self.mesh.state, damage.EVENT, told)
        self.history.damage = ""

    # -- engines ---------------------------------------------------------------------------------

    async def look(self) -> None:
        """Takes in which engines serve this job now; tells what has failed."""
        alive = {
            e.name: {**e.stats, "host": e.host}
            for e in await registry.entries(self.mesh.state, "engine")
            if e.alive and e.stats.get("job") == self.job.id and e.stats.get("ready")
        }
        self.router.observe(alive)
        self.hungry.set()
        if told := self.failures.hopeless:
            await self._fail(told)
        await self.failures.tell()

    # -- admission -------------------------------------------------------------------------------

    def wanted(self) -> int:
        """Groups to ask the gate for: enough for every slot, and one group in reserve."""
        size = self.config.algorithm.group_size
        if self.config.supervised:  # no engine is needed
            return max(0, 2 * self.config.algorithm.groups_per_step - len(self._groups))
        return max(0, -(-(self._room + size) // size)) if self.router.links else 0

    @property
    def _room(self) -> int:
        """Trajectories that would find an engine at once."""
        seats = self.router.capacity - len(self.router.stays)
        return min(seats, self.router.idle)

    def _shut(self, opened: int) -> bool:
        """Whether the gate holds back what there is room for, as it opened so many groups."""
        if opened or not (self.admitting and self.wanted()):
            return False
        return self.config.supervised or self._room > 0

    async def admit_forever(self) -> None:
        """Opens groups as soon as slots free up, as far as the staleness gate allows."""
        while True:
            await self.hungry.wait()
            self.hungry.clear()
            self._opening = self.admitting and bool(self.wanted())
            if not self._opening:
                self.worked.spent.put(SHUT, 0)
            try:
                opened = await self._admit() if self._opening else 0
                self.worked.spent.put(SHUT, self._opening and self._shut(opened))
            except MeshError as error:
                if not error.retryable:
                    raise
                self.mesh.telemetry.log.warning("admission", error=str(error))
                await self.mesh.clock.sleep(GATE_S)
                await patiently(self.mesh.clock, self._reconcile)
                opened = 0
            self._opening = False
            if self.admitting and self.wanted():
                if not opened:  # the gate is closed: a commit opens it
                    await self.mesh.clock.sleep(GATE_S)
                self.hungry.set()

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

    async def _reconcile(self) -> None:
        """Takes up groups that an admission opened whose reply was lost."""
        for a in await rows.open_groups(self.mesh.state, self.job.id, self.mesh.name):
            self.start(a, [])

    def start(self, admitted: rows.Admitted, members: list[Trajectory]) -> None:
        """Runs a group as a task of its own."""
        group = admitted.group
        self.enter(admitted.lineage, admitted.version)
        version = admitted.version
        if admitted.lineage < self.lineage:  # word of the next one was faster
            version = min(version, self._beginning)
        if group not in self._groups:
            work = self._group(group, admitted.prompt, version, members)
            task = asyncio.create_task(work, name=f"group {group}")
            self._groups[group] = task
            task.add_done_callback(lambda done: self._group_done(group, done))

    def enter(self, lineage: int, version: int) -> None:
        """The job is in a lineage, at `version`: if it is a new one, only engines that have its
        weights serve from now on, and nobody waits for a version that it may not reach.
        """
        if lineage <= self.lineage:
            return
        self.lineage, self._beginning = lineage, version
        for t in self.active:
            t.version = min(t.version, version)
        self.router.enter(lineage)

    def _group_done(self, group: int, task: asyncio.Task[None]) -> None:
        self._groups.pop(group, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A group that stops without a fate would be awaited without end: begin again from the
            # ledger.
            self.broken.fail(error)

    # -- groups ----------------------------------------------------------------------------------

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
            await self._hand_in(group, prompt, members)
            self.worked.groups += 1
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
            await self._dropped([t.ending.error for t in members if t.ending and t.ending.error])
        self.groups_finished += 1
        await self.ledger.log((Kind.CLOSE, [group, fate]))
        await patiently(self.mesh.clock, lambda: self.ledger.forget(group))

    async def _dropped(self, errors: list[str]) -> None:
        """Fails the job once all that the gate lets through at a time has failed: its code is
        broken, and would be for ever.
        """
        self._dropped_in_a_row += 1
        algorithm = self.config.algorithm
        if self._dropped_in_a_row < algorithm.groups_per_step * (algorithm.max_staleness + 1):
            return
        last = errors[-1]
        await self._fail(
            f"all of the last {self._dropped_in_a_row} groups failed; the last one: {last}"
        )

    async def _fail(self, told: str) -> None:
        """Ends the job."""
        await self.failures.close()
        await patiently(
            self.mesh.clock,
            lambda: jobs.set_phase(
                self.mesh.state,
                self.job.id,
                jobs.Phase.FAILED,
                self.mesh.token,
                self.mesh.name,
                told,
            ),
        )

    async def _hand_in(self, group: int, prompt: int, members: list[Trajectory]) -> None:
        message = finished_group(
            group, prompt, members, self.scorer.roles, lambda: model_config(self.job).expert_shape
        )
        await hand_in(self.mesh, self.bulk, self.job.id, message)

    # -- trajectories ----------------------------------------------------------------------------

    @property
    def active(self) -> list[Trajectory]:
        """The trajectories that are under way."""
        return [stay.trajectory for stay in self.router.stays.values()]

    async def _member(self, t: Trajectory, row: dict[str, Any]) -> None:
        """A trajectory to its end, and what the job's frozen models make of it."""
        if t.ending is not None:  # in the ledger
            return await self._scored(t)
        with self.worked.spent.within(IN_FLIGHT), self.times.of(t):
            await self._lived(t, row)
        self.worked.trajectories += 1
        if t.ending is not None and not t.ending.error:
            self.worked.ended(int((t.versions != NOT_SAMPLED).sum()), t.prompt_length)
        self.samples.ended(t, row, self.version)

    async def _lived(self, t: Trajectory, row: dict[str, Any]) -> None:
        if self.config.supervised:
            dataset, most = self.config.dataset, self.config.rollout.max_tokens
            await supervise(t, row, dataset.response, self.environments, most)
            if t.ending is not None and t.ending.error:
                row_failed = TrajectoryFailed(t.ending.error, kind="row that cannot be learned")
                t.ending = self._failed(t, row_failed)
            self.hungry.set()
        else:
            await self.run(t, row)
        await self._scored(t)

    async def _scored(self, t: Trajectory) -> None:
        """What the job's frozen models make of a trajectory that has a reward."""
        if t.ending is not None and t.ending.reward is not None:
            t.watch.enter("scoring")
            try:
                t.scores = await self.scorer.score(t.tokens)
            except ToolFailed as error:
                t.ending = self._failed(t, error)

    async def run(self, t: Trajectory, row: dict[str, Any]) -> None:
        """A trajectory to its end, from wherever the ledger has it."""
        if t.ending is None:
            with self.times.of(t):
                await self._run(t, row)

    async def _run(self, t: Trajectory, row: dict[str, Any]) -> None:
        stay = self.router.stay(t)
        try:
            async with stay:
                ending = await self._to_end(stay, row)
        finally:
            self.environments.close_one(t.id)
            self.sandbox.ended(str(t.id))
            self.hungry.set()
        if t.recorded:
            if t.last:  # with the end, so that a trajectory is never taken up between both
                self.ledger.defer(Kind.APPEND, [t.id, t.last], t.group)
            end = [t.id, ending.reason, ending.reward, ending.error]
            self.ledger.defer(Kind.END, end, t.group)
        t.ending = ending
        past = self.router.scheduler.ended(t, stay.course)
        if past is not None and self.history is not None:
            self.history.append(past)

    async def _to_end(self, stay: Stay, row: dict[str, Any]) -> Ending:
        """How a trajectory ends that stays at the engines."""
        t = stay.trajectory
        try:
            if t.length == 0:
                prompt = await self.environments.begin(t.id, row)
                self._fits(t, prompt)
                t.begin(prompt)
                if t.recorded:
                    head = [t.group, t.member, t.prompt, t.version, t.tokens.tolist()]
                    await self.ledger.log((Kind.OPEN, head), groups=(t.group,))
            reason, score = await self._turns(stay, row)
            stay.end()
            return Ending(reason, await self._reward(t, row, reason, score))
        except ToolFailed as error:
            self.mesh.telemetry.log.warning("trajectory failed", trajectory=t.id, error=str(error))
            return self._failed(t, error)

    def _failed(self, t: Trajectory, error: ToolFailed) -> Ending:
        """The ending of a trajectory that fails by type, which is told."""
        kind = self.failures.failed(error, evaluation=t.group >= EVALUATION_GROUP)
        return Ending("failed", None, str(error), kind)

    def _fits(self, t: Trajectory, prompt: list[int]) -> None:
        """TrajectoryFailed when a prompt leaves no room for an answer."""
        most = self.config.rollout.max_tokens
        if len(prompt) >= most:
            raise TrajectoryFailed(
                f"row {t.prompt}: its prompt has {len(prompt)} tokens",
                kind="prompt too long",
                fix=f"leave out what is longer than rollout.max_tokens = {most}, or raise it",
            )

    async def _reward(
        self, t: Trajectory, row: dict[str, Any], reason: str, score: float | None
    ) -> float:
        """Return the job's reward or judge's verdict, or else the environment's own score.
        TrajectoryFailed if that is no finite number.
        """
        found = await self._score(t, row, reason, score)
        if not math.isfinite(found):
            raise TrajectoryFailed(
                f"the reward is {found}, which is no finite number",
                kind="reward is not finite",
                fix="see what the reward, its weights or the environment return",
            )
        return found

    async def _score(
        self, t: Trajectory, row: dict[str, Any], reason: str, score: float | None
    ) -> float:
        environment = self.config.environment
        t.watch.enter("reward")
        if self.judge is not None:
            return await self.judge.verdict(row, self.transcript.turns(t, reason))
        if self.config.reward.declared:
            return await self.sandbox.reward(row, self.transcript.turns(t, reason))
        if not (environment.use or environment.verifiers):
            return 0.0
        if score is None:
            raise TrajectoryFailed(
                f"the environment has no score for the trajectory, which ended by {reason}",
                kind=f"ungradable, ended by {reason}",
                fix="set reward.use, or return {'done': True, 'reward': x}, and from cut(text)",
            )
        return score

    async def _turns(self, stay: Stay, row: dict[str, Any]) -> tuple[str, float | None]:
        """(why the trajectory ended, the environment's own score)."""
        config, t = self.config.rollout, stay.trajectory

        def replay(answered: bool = False) -> Any:
            return [row, t.replay(answered=answered), t.tokens[: t.turn_start].tolist()]

        while True:
            # A turn that the ledger knows to have ended is not asked for again: it may have ended
            # just where there is no room for more.
            ended = t.open_turn is not None
            if not ended and await stay.generate(self._limit(t)) is Finish.LENGTH:
                t.watch.enter("environment")
                said, score = await self.environments.cut(t.id, t.turn.tolist(), replay)
                t.open_turn = Turn(said, 0, cut=True)
                return "length", score
            t.watch.enter("environment")
            if t.open_turn is None or not t.open_turn.answered:
                t.open_turn = None
                text, action, value = await self.environments.step(t.id, t.turn.tolist(), replay)
                t.open_turn = Turn(text, len(t.turn))
                if t.recorded:
                    self.ledger.defer(Kind.TURN, [t.id, text], t.group)
            else:
                action, value = await self._told(t, replay)
            while action == "tool":
                if len(t.open_turn.calls()) >= CALLS:
                    raise TrajectoryFailed(
                        f"the environment asked for over {CALLS} tool calls in a turn",
                        kind="environment calls tools without end",
                    )
                name, argument = value
                earlier = t.called()
                t.watch.enter("tool")
                answer = await self.sandbox.tool(name, argument, str(t.id), earlier)
                await self._answered(stay, name, argument, answer)
                action, value = await self._told(t, replay)
            if action == "done":
                return "done", value
            if action == "last":
                ids, score = value
                if t.length + len(ids) <= config.max_tokens:
                    t.ended_with(ids)
                return "done", score
            spent = len(t.past_turns) + 1 >= config.max_turns
            if spent or t.length + len(value) >= config.max_tokens:
                _, score = await self.environments.cut(t.id, [], lambda: replay(answered=True))
                return "turns" if spent else "length", score
            if t.recorded:
                self.ledger.defer(Kind.APPEND, [t.id, value], t.group)
            t.appended(value)

    def _limit(self, t: Trajectory) -> int:
        """Tokens at which the trajectory is cut, its prompt included."""
        rollout = self.config.rollout
        if not rollout.lengths:
            return rollout.max_tokens
        index = t.group * self.config.algorithm.group_size + t.member
        forced = rollout.lengths[index % len(rollout.lengths)]
        return min(t.prompt_length + forced, rollout.max_tokens)

    async def _told(self, t: Trajectory, replay: Any) -> tuple[str, Any]:
        """What the environment does after the last tool's value."""
        assert t.open_turn is not None
        t.watch.enter("environment")
        return await self.environments.result(t.id, t.open_turn.value, replay)

    async def _answered(self, stay: Stay, name: str, argument: Any, answer: Any) -> None:
        t = stay.trajectory
        if t.recorded:
            await self.ledger.log((Kind.TOOL, [t.id, name, argument, answer]), groups=(t.group,))
        if t.open_turn is not None:
            t.open_turn.called(name, argument, answer)
            self.router.returned(stay)

    # -- stats and the end -----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What the live view and the planner read."""
        active = self.active
        lengths = np.array([t.length for t in active] or [0])
        histogram = np.histogram(lengths, (0, *BOUNDS, 1 << 40))[0] if active else np.zeros(0)
        return {
            "job": self.job.id,
            "in_flight": len(active),
            "waiting": self.router.waiting,
            "bounds": list(BOUNDS),
            "histogram": [int(n) for n in histogram],
            "tokens": self.commits.sampled,
            "groups": self.groups_finished,
            "work": measured.told(self.worked.work(self.commits.recorded)),
            **self._lengths(),
            **self.router.stats,
            "environments": self.environments.pids,
            "environments_stopped": self.environments.stopped(),
        }

    def _lengths(self) -> dict[str, Any]:
        lengths = self.worked.lengths
        return {"lengths": lengths.told()} if lengths is not None else {}

    async def close(self) -> None:
        """Leaves what is in flight to the ledger."""
        await self.failures.close()
        tasks = list(self._groups.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.samples.close()
        await self.times.close()
        await self.router.close()
        await self.commits.close()
        await self.sandbox.close()
        await self.scorer.close()
        if self.judge is not None:
            await self.judge.close()
        await self.environments.close()
        await self.ledger.close()
        if self.history is not None:
            self.history.close()
