"""Runner of a job's trajectories on a shard: each from its prompt, or from its state in the ledger,
to its reward.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.api.engine import FinishReason, SamplingParams
from meshrl.common.base.errors import ToolFailed
from meshrl.common.environment.reward_numbers import split_reward
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.common.records.ledger import RecordKind
from meshrl.services.rollout.environments.environment_pool import EnvironmentPool
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.record.shard_ledger import ShardLedger
from meshrl.services.rollout.rewards.group_scorer import GroupScorer
from meshrl.services.rollout.rewards.judge import create_judge
from meshrl.services.rollout.rewards.sandbox_client import SandboxClient
from meshrl.services.rollout.rewards.scoring_client import ScoringClient
from meshrl.services.rollout.routing.assignment import Assignment
from meshrl.services.rollout.routing.cmlfq import BucketScheduler
from meshrl.services.rollout.routing.length_history import LengthHistory
from meshrl.services.rollout.routing.length_trees import LengthTrees
from meshrl.services.rollout.routing.queue_policy import LengthBucket
from meshrl.services.rollout.routing.router import Router
from meshrl.services.rollout.trajectories.failures import FailureReporter, TrajectoryFailed
from meshrl.services.rollout.trajectories.trajectory import (
    NOT_SAMPLED,
    Trajectory,
    TrajectoryOutcome,
    Turn,
)
from meshrl.services.rollout.trajectories.transcript import (
    Transcript,
    build_adjustments,
    find_stop_token_ids,
)
from meshrl.services.rollout.trajectories.turn_player import TurnPlayer
from meshrl.services.rollout.work_counters import ShardWorkCounters, TrajectoryTracer

FIRST_EVALUATION_GROUP = 1 << 40  # evaluation groups are numbered from here, and are not recorded
TOO_LONG_FIX = "Remove rows longer than {}.max_tokens = {}, or raise it"
SUPERVISED_REWARD = 1.0  # reward of every sft answer


class TrajectoryRunner:
    """Runner with the job's engines, environments, tools, rewards and ledger. Tokens of training
    trajectories count once they are in the ledger; evaluation trajectories restart with the
    shard.
    """

    def __init__(self, mesh: Mesh, job: JobData, logs: Path) -> None:
        self.mesh, self.job, self.config = mesh, job, job.config
        rollout = job.config.rollout
        self.failures = FailureReporter(mesh, job.id)
        self.sandbox_client = SandboxClient(mesh, job, self.failures)
        self.environment_pool = EnvironmentPool(mesh, job, logs, self.failures)
        self.ledger = ShardLedger(mesh, job)
        buckets = [LengthBucket(b.max_tokens, b.batch, b.engines) for b in rollout.buckets]
        buckets = buckets or [LengthBucket(rollout.max_tokens, rollout.slots)]
        follows = not rollout.buckets and len(set(rollout.tensor_parallel)) > 1
        self.history = (
            LengthHistory(mesh.host, self.ledger.directory, root=job.local_run_dir)
            if len(buckets) > 1 or follows
            else None
        )
        lengths = LengthTrees(self.history.latest if self.history else ())
        scheduler = BucketScheduler(buckets, lengths, follows)
        self.group_commit = GroupCommit(mesh, self.ledger)
        tokenizer = Tokenizer.load(str(job.tokenizer_file))
        sampling = self._build_sampling(tokenizer)
        self.router = Router(mesh, self.group_commit, sampling, rollout.slots, scheduler)
        self.transcript = Transcript(
            tokenizer.decode, self.router.stop_token_ids, rollout.stop_text
        )
        self.tracer = TrajectoryTracer(mesh, job)
        self.scoring_client = ScoringClient(mesh, job)
        self.judge = create_judge(mesh, job, self.scoring_client)
        self.work_counters = ShardWorkCounters(self.router.occupancy)
        self.slot_freed = asyncio.Event()  # capacity for another trajectory

    def _build_sampling(self, tokenizer: Tokenizer) -> SamplingParams:
        rollout = self.config.rollout
        forced = bool(rollout.forced_lengths)  # then lengths alone end a turn
        return SamplingParams(
            stop_token_ids=[] if forced else find_stop_token_ids(tokenizer, rollout.stop),
            stop_strings=[] if forced else rollout.stop_text,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            adjustments=build_adjustments(tokenizer, rollout),
        )

    def find_max_tokens(self, trajectory: Trajectory) -> int:
        """Return the maximum length of a trajectory, prompt included."""
        return trajectory.max_tokens or self.config.rollout.max_tokens

    @property
    def active_trajectories(self) -> list[Trajectory]:
        return [stay.trajectory for stay in self.router.assignments.values()]

    async def run_training(self, trajectory: Trajectory, row: dict[str, Any]) -> None:
        """Run a training trajectory to its end, and score it with the job's frozen models. A
        trajectory that has ended in the ledger is only scored.
        """
        if trajectory.outcome is not None:
            return await self._score(trajectory)
        with self.work_counters.count_flight(), self.tracer.trace(trajectory):
            if self.config.is_supervised:
                most = self.config.rollout.max_tokens
                await fill_supervised(trajectory, row, self.environment_pool, most)
                if trajectory.outcome is not None and trajectory.outcome.error:
                    row_failed = TrajectoryFailed(
                        trajectory.outcome.error, kind="row that cannot be learned"
                    )
                    trajectory.outcome = self._record_failure(trajectory, row_failed)
                self.slot_freed.set()
            else:
                await self.run(trajectory, row)
            await self._score(trajectory)
        self.work_counters.trajectories += 1
        if trajectory.outcome is not None and not trajectory.outcome.error:
            self.work_counters.add_trajectory(
                int((trajectory.versions != NOT_SAMPLED).sum()), trajectory.prompt_length
            )

    async def _score(self, trajectory: Trajectory) -> None:
        if trajectory.outcome is not None and trajectory.outcome.reward is not None:
            trajectory.stopwatch.enter("scoring")
            try:
                trajectory.scores = await self.scoring_client.score(trajectory.tokens)
            except ToolFailed as error:
                trajectory.outcome = self._record_failure(trajectory, error)

    async def run(self, trajectory: Trajectory, row: dict[str, Any]) -> None:
        if trajectory.outcome is None:
            try:
                with self.tracer.trace(trajectory):
                    await self._run_assigned(trajectory, row)
            finally:
                if trajectory.group_scorer is not None:
                    trajectory.group_scorer.leave(trajectory.member)

    async def _run_assigned(self, trajectory: Trajectory, row: dict[str, Any]) -> None:
        stay = self.router.create_assignment(trajectory)
        try:
            async with stay:
                ending = await self.run_to_end(stay, row)
        finally:
            self.environment_pool.close_environment(trajectory.id)
            self.sandbox_client.end_session(str(trajectory.id))
            self.slot_freed.set()
        if trajectory.is_recorded:
            # together with the end, so that no trajectory is recovered between both
            if trajectory.last_observation:
                self.ledger.defer_record(
                    RecordKind.APPEND,
                    [trajectory.id, trajectory.last_observation],
                    trajectory.group,
                )
            end = [trajectory.id, ending.reason, ending.reward, ending.error, ending.metrics]
            self.ledger.defer_record(RecordKind.END, end, trajectory.group)
        trajectory.outcome = ending
        past = self.router.scheduler.record_end(trajectory, stay.bucket_state)
        if past is not None and self.history is not None:
            self.history.append(past)

    async def run_to_end(self, assignment: Assignment, row: dict[str, Any]) -> TrajectoryOutcome:
        t = assignment.trajectory
        try:
            if t.length == 0:
                prompt = await self.environment_pool.begin(t.id, row)
                most = self.find_max_tokens(t)
                if len(prompt) >= most:
                    raise TrajectoryFailed(
                        f"row {t.row}: its prompt has {len(prompt)} tokens",
                        kind="prompt too long",
                        fix=TOO_LONG_FIX.format("evaluation" if t.max_tokens else "rollout", most),
                    )
                t.set_prompt(prompt)
                if t.is_recorded:
                    head = [t.group, t.member, t.prompt, t.version, t.tokens.tolist()]
                    await self.ledger.write_records((RecordKind.OPEN, head), groups=(t.group,))
            reason, score = await JobTurnPlayer(self, assignment, row).play()
            assignment.finish()
            reward, metrics = await self.compute_reward(t, row, reason, score)
            return TrajectoryOutcome(reason, reward, metrics=metrics)
        except ToolFailed as error:
            self.mesh.telemetry.log.warning("trajectory failed", trajectory=t.id, error=str(error))
            return self._record_failure(t, error)

    def _record_failure(self, trajectory: Trajectory, error: ToolFailed) -> TrajectoryOutcome:
        kind = self.failures.count_failure(
            error, evaluation=trajectory.group >= FIRST_EVALUATION_GROUP
        )
        return TrajectoryOutcome("failed", None, str(error), kind)

    async def compute_reward(
        self, trajectory: Trajectory, row: dict[str, Any], reason: str, score: Any
    ) -> tuple[float, dict[str, float]]:
        """Return the job's reward or judge's verdict, or else the environment's own score, with the
        metrics of both. Raise TrajectoryFailed if the reward is no finite number.
        """
        environment = self.config.environment
        found, own = split_reward(score)
        metrics = {f"environment/{name}": number for name, number in own.items()}
        trajectory.stopwatch.enter("reward")
        if self.judge is not None:
            found = await self.judge.judge_trajectory(
                row, self.transcript.build_turns(trajectory, reason)
            )
        elif self.config.reward.reward_parts:
            turns = self.transcript.build_turns(trajectory, reason)
            if trajectory.group_scorer is not None:
                value = await trajectory.group_scorer.score(trajectory.member, turns)
            else:
                value = await self.sandbox_client.compute_reward(row, turns)
            found, own = split_reward(value)
            metrics |= {f"reward/{name}": number for name, number in own.items()}
        elif not (environment.use or environment.verifiers):
            found = 0.0
        if found is None:
            raise TrajectoryFailed(
                f"the environment returned no reward for the trajectory, which ended by {reason}",
                kind=f"ungradable, ended by {reason}",
                fix="Set reward.use, or return {'done': True, 'reward': x}, also from cut(text)",
            )
        if not math.isfinite(found):
            raise TrajectoryFailed(
                f"the reward is {found}, not a finite number",
                kind="reward is not finite",
                fix="Check the values that the reward, its weights and the environment return",
            )
        return found, metrics

    def create_group_scorer(
        self,
        trajectories: Sequence[Trajectory],
        row: dict[str, Any],
        recorded: Mapping[int, Any] | None = None,
    ) -> GroupScorer:
        """Create the scorer of a group's members that have not ended, and give it to them."""
        first = trajectories[0]

        async def record(rewards: dict[int, Any]) -> None:
            payload = [first.group, [[member, reward] for member, reward in rewards.items()]]
            await self.ledger.write_records((RecordKind.REWARDS, payload), groups=(first.group,))

        pending = [t for t in trajectories if t.outcome is None]
        scorer = GroupScorer(
            (t.member for t in pending),
            partial(self.sandbox_client.compute_group_rewards, row),
            recorded,
            record if first.is_recorded else None,
        )
        for t in pending:
            t.group_scorer = scorer
        return scorer

    async def close(self) -> None:
        """Close the runner; trajectories in flight remain in the ledger."""
        await self.tracer.close()
        await self.router.close()
        await self.group_commit.close()
        await self.sandbox_client.close()
        await self.scoring_client.close()
        if self.judge is not None:
            await self.judge.close()
        await self.environment_pool.close()
        await self.ledger.close()
        if self.history is not None:
            self.history.close()


class JobTurnPlayer(TurnPlayer):
    """Turns of a trajectory at a shard's engines."""

    def __init__(
        self, runner: TrajectoryRunner, assignment: Assignment, row: dict[str, Any]
    ) -> None:
        rollout = runner.config.rollout
        t = assignment.trajectory
        super().__init__(t, runner.find_max_tokens(t), rollout.max_turns)
        self._runner, self._assignment, self._row = runner, assignment, row

    def _build_replay(self, answered: bool = False) -> Any:
        t = self.trajectory
        return [self._row, t.build_replay(answered=answered), t.tokens[: t.turn_start].tolist()]

    async def generate(self) -> FinishReason:
        t, config = self.trajectory, self._runner.config
        limit, forced = self.max_tokens, config.rollout.forced_lengths
        if forced:
            index = t.group * config.algorithm.group_size + t.member
            limit = min(t.prompt_length + forced[index % len(forced)], limit)
        return await self._assignment.generate(limit)

    async def step_environment(self, ids: list[int]) -> tuple[str, str, Any]:
        self.trajectory.stopwatch.enter("environment")
        return await self._runner.environment_pool.step(self.trajectory.id, ids, self._build_replay)

    async def send_tool_result(self, value: Any) -> tuple[str, Any]:
        self.trajectory.stopwatch.enter("environment")
        return await self._runner.environment_pool.send_tool_result(
            self.trajectory.id, value, self._build_replay
        )

    async def end_early(self, ids: list[int], has_tool_value: bool) -> tuple[str, Any]:
        self.trajectory.stopwatch.enter("environment")
        replay = lambda: self._build_replay(has_tool_value)  # noqa: E731
        return await self._runner.environment_pool.end_early(self.trajectory.id, ids, replay)

    async def call_tool(self, name: str, argument: Any) -> Any:
        t, runner = self.trajectory, self._runner
        earlier = t.list_tool_calls()
        t.stopwatch.enter("tool")
        answer = await runner.sandbox_client.call_tool(name, argument, str(t.id), earlier)
        if t.is_recorded:
            await runner.ledger.write_records(
                (RecordKind.TOOL, [t.id, name, argument, answer]), groups=(t.group,)
            )
        if t.open_turn is not None:
            t.open_turn.add_call(name, argument, answer)
            runner.router.on_tool_return(self._assignment)
        return answer

    def on_model_turn(self, text: str, *, is_cut: bool = False) -> None:
        if self.trajectory.is_recorded and not is_cut:
            self._runner.ledger.defer_record(
                RecordKind.TURN, [self.trajectory.id, text], self.trajectory.group
            )

    def on_append(self, ids: list[int], *, is_last: bool = False) -> None:
        if self.trajectory.is_recorded and not is_last:
            self._runner.ledger.defer_record(
                RecordKind.APPEND, [self.trajectory.id, ids], self.trajectory.group
            )


async def fill_supervised(
    trajectory: Trajectory,
    row: dict[str, Any],
    environment_pool: EnvironmentPool,
    max_tokens: int,
) -> None:
    """Fill an sft trajectory with the row's own prompt and answers, encoded and not sampled, and
    end it. A row that cannot be learned fails by type.

    The ledger does not store it, as the row contains it.
    """
    trajectory.is_recorded = False
    try:
        pieces = await environment_pool.encode_answer(trajectory.id, row)
        if not any(ids and text is not None for ids, text in pieces):
            raise ToolFailed("the answer has no tokens")
        length = sum(len(ids) for ids, _ in pieces)
        if length > max_tokens:
            raise ToolFailed(
                f"prompt and answer have {length} tokens",
                fix=TOO_LONG_FIX.format("rollout", max_tokens),
            )
    except ToolFailed as error:
        trajectory.outcome = TrajectoryOutcome("failed", None, f"row {trajectory.row}: {error}")
        return
    trajectory.set_prompt(pieces[0][0])
    for ids, text in pieces[1:]:
        if text is None:
            trajectory.append(ids)
            continue
        n = len(ids)
        trajectory.append_sampled(
            np.array(ids, np.int32),
            np.zeros(n, np.float32),
            np.full(n, trajectory.version, np.int32),
        )
        trajectory.open_turn = Turn(text, n)
    trajectory.outcome = TrajectoryOutcome("done", SUPERVISED_REWARD)
