"""The runner of a job's trajectories on a shard: each from its prompt, or from where the ledger has
it, to its reward.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.api.engine import Finish, Sampling
from meshrl.common.base.errors import ToolFailed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.common.records.ledger import Kind
from meshrl.services.rollout.environments.pool import EnvironmentPool
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.record.shard_ledger import ShardLedger
from meshrl.services.rollout.rewards.judge import judge_of
from meshrl.services.rollout.rewards.sandboxes import SandboxClient
from meshrl.services.rollout.rewards.scoring import Scorer
from meshrl.services.rollout.routing.cmlfq import Scheduler
from meshrl.services.rollout.routing.length_history import LengthHistory
from meshrl.services.rollout.routing.lengths import LengthTrees
from meshrl.services.rollout.routing.queues import LengthBucket
from meshrl.services.rollout.routing.router import Router
from meshrl.services.rollout.routing.stay import Stay
from meshrl.services.rollout.trajectories.failures import Failures, TrajectoryFailed
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Ending, Trajectory
from meshrl.services.rollout.trajectories.transcript import Transcript, stop_ids
from meshrl.services.rollout.trajectories.turns import TurnPlayer
from meshrl.services.rollout.worked import IN_FLIGHT, TrajectoryTimes, Worked

EVALUATION_GROUP = 1 << 40  # evaluation's groups are numbered from here, off the books
TOO_LONG = "leave out what is longer than rollout.max_tokens = {}, or raise it"
LEARNED = 1.0  # reward of every answer of sft


class TrajectoryRunner:
    """All that trajectories of a job are run with: engines, environments, tools, rewards and the
    ledger. Training trajectories are in the ledger before their tokens count; evaluation's start
    over when the shard does.
    """

    def __init__(self, mesh: Mesh, job: JobData, logs: Path) -> None:
        self.mesh, self.job, self.config = mesh, job, job.config
        rollout = job.config.rollout
        self.failures = Failures(mesh, job.id)
        self.sandbox = SandboxClient(mesh, job, self.failures)
        self.environments = EnvironmentPool(mesh, job, logs, self.failures)
        self.ledger = ShardLedger(mesh, job)
        buckets = [LengthBucket(b.max_tokens, b.batch, b.engines) for b in rollout.buckets]
        buckets = buckets or [LengthBucket(rollout.max_tokens, rollout.slots)]
        follows = not rollout.buckets and len(set(rollout.tensor_parallel)) > 1
        self.history = (
            LengthHistory(mesh.host, self.ledger.directory, root=job.here)
            if len(buckets) > 1 or follows
            else None
        )
        lengths = LengthTrees(self.history.latest if self.history else ())
        scheduler = Scheduler(buckets, len(job.rows("train")), lengths, follows)
        self.commits = GroupCommit(mesh, self.ledger)
        tokenizer = Tokenizer.load(str(job.tokenizer))
        sampling = self._sampling(tokenizer)
        self.router = Router(mesh, self.commits, sampling, rollout.slots, scheduler)
        self.transcript = Transcript(tokenizer.decode, self.router.stop, rollout.stop_text)
        self.times = TrajectoryTimes(mesh, job)
        self.scorer = Scorer(mesh, job)
        self.judge = judge_of(mesh, job, self.scorer)
        self.worked = Worked(self.router.spent)
        self.freed = asyncio.Event()  # there is room for another trajectory

    def _sampling(self, tokenizer: Tokenizer) -> Sampling:
        rollout = self.config.rollout
        forced = bool(rollout.lengths)  # then nothing else ends a turn
        return Sampling(
            stop=[] if forced else stop_ids(tokenizer, rollout.stop),
            stop_text=[] if forced else rollout.stop_text,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
        )

    @property
    def active(self) -> list[Trajectory]:
        return [stay.trajectory for stay in self.router.stays.values()]

    async def train(self, t: Trajectory, row: dict[str, Any]) -> None:
        """A trajectory of training to its end, and what the job's frozen models make of it; one
        that the ledger has ended is only scored.
        """
        if t.ending is not None:
            return await self._scored(t)
        with self.worked.spent.within(IN_FLIGHT), self.times.of(t):
            if self.config.supervised:
                dataset, most = self.config.dataset, self.config.rollout.max_tokens
                await supervise(t, row, dataset.response, self.environments, most)
                if t.ending is not None and t.ending.error:
                    row_failed = TrajectoryFailed(t.ending.error, kind="row that cannot be learned")
                    t.ending = self._failed(t, row_failed)
                self.freed.set()
            else:
                await self.run(t, row)
            await self._scored(t)
        self.worked.trajectories += 1
        if t.ending is not None and not t.ending.error:
            self.worked.ended(int((t.versions != NOT_SAMPLED).sum()), t.prompt_length)

    async def _scored(self, t: Trajectory) -> None:
        if t.ending is not None and t.ending.reward is not None:
            t.watch.enter("scoring")
            try:
                t.scores = await self.scorer.score(t.tokens)
            except ToolFailed as error:
                t.ending = self._failed(t, error)

    async def run(self, t: Trajectory, row: dict[str, Any]) -> None:
        if t.ending is None:
            with self.times.of(t):
                await self._run(t, row)

    async def _run(self, t: Trajectory, row: dict[str, Any]) -> None:
        stay = self.router.stay(t)
        try:
            async with stay:
                ending = await self.to_end(stay, row)
        finally:
            self.environments.close_one(t.id)
            self.sandbox.ended(str(t.id))
            self.freed.set()
        if t.recorded:
            if t.last:  # with the end, so that a trajectory is never taken up between both
                self.ledger.defer(Kind.APPEND, [t.id, t.last], t.group)
            end = [t.id, ending.reason, ending.reward, ending.error]
            self.ledger.defer(Kind.END, end, t.group)
        t.ending = ending
        past = self.router.scheduler.ended(t, stay.course)
        if past is not None and self.history is not None:
            self.history.append(past)

    async def to_end(self, stay: Stay, row: dict[str, Any]) -> Ending:
        t = stay.trajectory
        try:
            if t.length == 0:
                prompt = await self.environments.begin(t.id, row)
                most = self.config.rollout.max_tokens
                if len(prompt) >= most:
                    raise TrajectoryFailed(
                        f"row {t.prompt}: its prompt has {len(prompt)} tokens",
                        kind="prompt too long",
                        fix=TOO_LONG.format(most),
                    )
                t.begin(prompt)
                if t.recorded:
                    head = [t.group, t.member, t.prompt, t.version, t.tokens.tolist()]
                    await self.ledger.log((Kind.OPEN, head), groups=(t.group,))
            reason, score = await JobTurns(self, stay, row).play()
            stay.end()
            return Ending(reason, await self.reward(t, row, reason, score))
        except ToolFailed as error:
            self.mesh.telemetry.log.warning("trajectory failed", trajectory=t.id, error=str(error))
            return self._failed(t, error)

    def _failed(self, t: Trajectory, error: ToolFailed) -> Ending:
        kind = self.failures.failed(error, evaluation=t.group >= EVALUATION_GROUP)
        return Ending("failed", None, str(error), kind)

    async def reward(
        self, t: Trajectory, row: dict[str, Any], reason: str, score: float | None
    ) -> float:
        """Return the job's reward or judge's verdict, or else the environment's own score.
        TrajectoryFailed if that is no finite number.
        """
        environment = self.config.environment
        t.watch.enter("reward")
        if self.judge is not None:
            found = await self.judge.verdict(row, self.transcript.turns(t, reason))
        elif self.config.reward.declared:
            found = await self.sandbox.reward(row, self.transcript.turns(t, reason))
        elif not (environment.use or environment.verifiers):
            found = 0.0
        elif score is not None:
            found = score
        else:
            raise TrajectoryFailed(
                f"the environment has no score for the trajectory, which ended by {reason}",
                kind=f"ungradable, ended by {reason}",
                fix="set reward.use, or return {'done': True, 'reward': x}, and from cut(text)",
            )
        if not math.isfinite(found):
            raise TrajectoryFailed(
                f"the reward is {found}, which is no finite number",
                kind="reward is not finite",
                fix="see what the reward, its weights or the environment return",
            )
        return found

    async def close(self) -> None:
        """Leaves what is in flight to the ledger."""
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


class JobTurns(TurnPlayer):
    """The turns of a trajectory that stays at a shard's engines."""

    def __init__(self, runner: TrajectoryRunner, stay: Stay, row: dict[str, Any]) -> None:
        rollout = runner.config.rollout
        super().__init__(stay.trajectory, rollout.max_tokens, rollout.max_turns)
        self._runner, self._stay, self._row = runner, stay, row

    def _replay(self, answered: bool = False) -> Any:
        t = self.t
        return [self._row, t.replay(answered=answered), t.tokens[: t.turn_start].tolist()]

    async def generate(self) -> Finish:
        t, config = self.t, self._runner.config
        limit, forced = config.rollout.max_tokens, config.rollout.lengths
        if forced:
            index = t.group * config.algorithm.group_size + t.member
            limit = min(t.prompt_length + forced[index % len(forced)], limit)
        return await self._stay.generate(limit)

    async def step(self, ids: list[int]) -> tuple[str, str, Any]:
        self.t.watch.enter("environment")
        return await self._runner.environments.step(self.t.id, ids, self._replay)

    async def result(self, value: Any) -> tuple[str, Any]:
        self.t.watch.enter("environment")
        return await self._runner.environments.result(self.t.id, value, self._replay)

    async def cut(self, ids: list[int], answered: bool) -> tuple[str, float | None]:
        self.t.watch.enter("environment")
        replay = lambda: self._replay(answered)  # noqa: E731
        return await self._runner.environments.cut(self.t.id, ids, replay)

    async def call(self, name: str, argument: Any) -> Any:
        t, runner = self.t, self._runner
        earlier = t.called()
        t.watch.enter("tool")
        answer = await runner.sandbox.tool(name, argument, str(t.id), earlier)
        if t.recorded:
            await runner.ledger.log((Kind.TOOL, [t.id, name, argument, answer]), groups=(t.group,))
        if t.open_turn is not None:
            t.open_turn.called(name, argument, answer)
            runner.router.returned(self._stay)
        return answer

    def said(self, text: str, *, cut: bool = False) -> None:
        if self.t.recorded and not cut:
            self._runner.ledger.defer(Kind.TURN, [self.t.id, text], self.t.group)

    def appended(self, ids: list[int], *, last: bool = False) -> None:
        if self.t.recorded and not last:
            self._runner.ledger.defer(Kind.APPEND, [self.t.id, ids], self.t.group)


async def supervise(
    t: Trajectory,
    row: dict[str, Any],
    response: str,
    environments: EnvironmentPool,
    max_tokens: int,
) -> None:
    """Fills a trajectory of sft with the row's own prompt and answer, encoded and not sampled, and
    ends it; one that cannot be learned fails by type.

    Nothing of it is in the ledger: the row gives it again.
    """
    t.recorded = False
    try:
        prompt, answer = await environments.answer(t.id, row, row.get(response))
        if not answer:
            raise ToolFailed("the answer has no token")
        if len(prompt) + len(answer) > max_tokens:
            raise ToolFailed(
                f"prompt and answer have {len(prompt) + len(answer)} tokens",
                fix=TOO_LONG.format(max_tokens),
            )
    except ToolFailed as error:
        t.ending = Ending("failed", None, f"row {t.prompt}: {error}")
        return
    n = len(answer)
    t.begin(prompt)
    t.sampled(np.array(answer, np.int32), np.zeros(n, np.float32), np.full(n, t.version, np.int32))
    t.ending = Ending("done", LEARNED)
