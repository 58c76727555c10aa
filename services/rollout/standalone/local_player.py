"""Player of trajectories with one engine in this process, the job's environment and its tools,
without a mesh.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import torch

from meshrl.common.api.engine import FinishReason
from meshrl.common.api.sandbox import (
    OK,
    CallOutcome,
    LoadResult,
    Outcomes,
    RewardBatch,
    RewardCall,
    RunTools,
    ToolCall,
)
from meshrl.common.base.encoding.messages import decode, encode
from meshrl.common.base.errors import MeshError, Refused, ToolFailed, from_wire
from meshrl.common.environment.reward_numbers import split_reward
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.job.builtin import PERSON
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.tokens.tokenizer import Tokenizer, with_tokenizer
from meshrl.services.rollout.environments.environment_pool import build_command
from meshrl.services.rollout.environments.environment_process import (
    START_TIMEOUT_S,
    decode_answer,
    encode_operation,
    stop_child,
)
from meshrl.services.rollout.rewards.sandbox_client import LIVE_SESSION_STATUSES, build_load_request
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.services.rollout.trajectories.transcript import (
    Transcript,
    build_adjustments,
    build_tool_turn,
    find_stop_token_ids,
)
from meshrl.services.rollout.trajectories.turn_player import TurnPlayer

CONVERSATION_TOKENS = 4096  # tokens of a conversation, if the model has that many positions
CONVERSATION_ENVIRONMENT = "meshrl.services.environment.person_environment:make_environment"
LOAD_TIMEOUT_S = 120.0  # limit for the sandbox's import of the job's modules

ReadInput = Callable[[], Awaitable[str | None]]  # input of the user; None: no more
ShowTurn = Callable[[dict[str, Any]], None]  # called with each turn, as rewards receive it


@dataclass(frozen=True)
class PlaySettings:
    """Settings of a trajectory."""

    temperature: float
    max_new_tokens: int  # sampled tokens of the trajectory
    show_turn: ShowTurn
    read_input: ReadInput | None = None  # None: no user input


@dataclass
class PlayedTrajectory:
    """Finished trajectory."""

    prompt: str
    turns: list[dict[str, Any]]
    reason: str  # done, length or turns
    score: float | None  # of the environment, or the job's reward; None: no score
    tokens: int = 0  # in total, with the prompt and appended tokens
    sampled_tokens: int = 0  # of these, sampled by the model
    metrics: dict[str, float] = field(default_factory=dict)  # of the score


class LocalPlayer:
    """Model of a directory in a job. `is_conversation`: trajectories are conversations with a user,
    independent of the job's environment.
    """

    def __init__(
        self, host: Host, job: JobData, model: Path, scratch: Path, *, is_conversation: bool
    ) -> None:
        if is_conversation:
            environment = replace(job.config.environment, use=CONVERSATION_ENVIRONMENT)
            dataset = replace(job.config.dataset, prompt="prompt")
            job = replace(job, config=replace(job.config, environment=environment, dataset=dataset))
        self.host, self.job, self.scratch = host, job, scratch
        self.tokenizer = Tokenizer.load(str(job.tokenizer_file))
        rollout = job.config.rollout
        shape, decoder = load_model(model)
        desired_length = (
            max(rollout.max_tokens, CONVERSATION_TOKENS) if is_conversation else rollout.max_tokens
        )
        self.max_length = min(desired_length, shape.max_positions)
        self.stop_token_ids = tuple(find_stop_token_ids(self.tokenizer, rollout.stop))
        self.adjustments = build_adjustments(self.tokenizer, rollout)
        self.transcript = Transcript(self.tokenizer.decode, self.stop_token_ids, rollout.stop_text)
        torch.set_num_threads(1)
        self._engine: BuiltinEngine = build_engine(
            with_tokenizer(shape, job.tokenizer_file),
            1,
            self.max_length,
            backend=rollout.backend,
            dtype=rollout.dtype,
            decode_tokens=self.tokenizer.decode,
        )
        self._engine.wake(decoder.state_dict(), 0)
        self._environment: ChildProcess | None = None
        self._sandbox: ChildProcess | None = None
        self._is_starting = True

    async def play(
        self,
        key: int,
        row: dict[str, Any],
        temperature: float,
        seed: int,
        show_turn: ShowTurn,
        read_input: ReadInput | None = None,
        with_reward: bool = False,
        max_new_tokens: int | None = None,
    ) -> PlayedTrajectory:
        """Play a trajectory of a row to its end, and show each completed turn.

        Without `read_input` a conversation ends after the model's first answer. `with_reward`:
        compute the job's reward. The model samples at most `max_new_tokens` tokens; None: as many
        as fit. Raise ToolFailed if the environment, a tool or the reward fails, and Refused if the
        prompt leaves no room.
        """
        t = Trajectory(key, 0, 0, 0, seed)
        t.set_prompt(await self.call_environment(key, "begin", row))
        if t.length >= self.max_length:
            raise Refused(
                f"the prompt has {t.length} tokens, and a trajectory may have at most "
                f"{self.max_length}",
                fix="Shorten it, or raise rollout.max_tokens up to the model's positions",
            )
        show_turn({"role": "prompt", "text": self.transcript.decode_prompt(t)})
        max_new_tokens = self.max_length if max_new_tokens is None else max_new_tokens
        turns_of = LocalTurnPlayer(
            self, t, PlaySettings(temperature, max_new_tokens, show_turn, read_input)
        )
        reason, score = await turns_of.play()
        await self.call_environment(key, "close", None)
        turns = self.transcript.build_turns(t, reason)
        score, metrics = split_reward(score)
        if with_reward and self.job.config.reward.reward_parts:
            score, metrics = await self.compute_reward(row, turns)
        prompt = self.transcript.decode_prompt(t)
        return PlayedTrajectory(prompt, turns, reason, score, t.length, _count_sampled(t), metrics)

    def generate(
        self, trajectory: Trajectory, temperature: float, max_new_tokens: int
    ) -> FinishReason:
        """Sample a turn of at most `max_new_tokens` tokens onto the trajectory; return its finish
        reason.
        """
        rollout = self.job.config.rollout
        request = GenerationRequest(
            id=trajectory.id,
            tokens=trajectory.tokens.copy(),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_ids=self.stop_token_ids,
            seed=trajectory.seed,
            session=trajectory.id,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            adjustments=self.adjustments,
            stop_strings=tuple(rollout.stop_text),
        )
        self._engine.submit([request])
        finish = FinishReason.RUNNING
        while finish is FinishReason.RUNNING:
            self._engine.step()
            flush = self._engine.drain_outputs()
            if flush is not None:
                trajectory.append_sampled(flush.tokens, flush.logprobs, flush.versions)
                finish = FinishReason(int(flush.finish_reasons[-1]))
        return finish

    async def call_environment(self, key: int, operation: str, argument: Any) -> Any:
        deadline_s = self.job.config.environment.step_deadline_s
        log = self.scratch / "environment.log"
        if self._environment is None:
            argv = build_command(self.job)
            self._environment = self.host.spawn(
                argv,
                name="environment",
                log=log,
                options=SpawnOptions(has_channel=True, is_guarded=True),
            )
            deadline_s += START_TIMEOUT_S
        message = encode_operation((key, operation, argument), operation, "environment")
        if not isinstance(message, bytes):
            raise message
        try:
            await self._environment.send(msgpack.Packer().pack_array_header(1) + message)
            answers = msgpack.unpackb(await self._environment.recv(deadline_s), raw=False)
        except (OSError, EOFError, MeshError) as error:
            lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
            last_line = lines[-1] if lines else ""
            raise ToolFailed(
                f"the environment did not answer {operation}(): {last_line or error}",
                fix="Correct the job's module",
            ) from error
        [[_, status, value]] = answers
        answer = decode_answer(status, value, "environment")
        if isinstance(answer, MeshError):
            raise answer
        return answer

    async def call_tool(self, name: str, argument: Any, session: str, begun: bool) -> Any:
        config = self.job.config
        if name not in config.environment.tools:
            known = ", ".join(sorted(config.environment.tools)) or "none"
            raise ToolFailed(f"there is no tool {name!r}", fix=f"Use a tool of the job: {known}")
        deadline_s = max(config.environment.tool_deadline_s, config.sandbox.wall_s)
        call = ToolCall(0, self.job.id, name, argument, deadline_s, session, begun)
        outcome = await self._call_sandbox("run_tools", RunTools([call]), 5 * deadline_s)
        if outcome.status != OK and outcome.value is None:
            raise ToolFailed(f"tool {name} failed: {outcome.status}: {outcome.error}")
        return outcome.value

    async def compute_reward(
        self, row: dict[str, Any], turns: list[dict[str, Any]]
    ) -> tuple[float | None, dict[str, float]]:
        """Compute the job's reward of a trajectory of a row, and its metrics. Raise ToolFailed if
        it fails.
        """
        reward = self.job.config.reward
        deadline_s, group = reward.deadline_s, [turns] if reward.over_group else []
        call = RewardCall(0, self.job.id, row, turns, deadline_s, group)
        outcome = await self._call_sandbox(
            "score_trajectories", RewardBatch([call]), 5 * deadline_s
        )
        if outcome.status != OK:
            raise ToolFailed(f"the reward failed: {outcome.status}: {outcome.error}")
        return split_reward(outcome.value[0] if reward.over_group else outcome.value)

    async def _call_sandbox(self, method: str, request: Any, deadline_s: float) -> CallOutcome:
        if self._sandbox is None:
            argv = [sys.executable, "-m", "meshrl.services.sandbox.standalone"]
            log = self.scratch / "sandbox.log"
            self._sandbox = self.host.spawn(
                argv, name="sandbox", log=log, options=SpawnOptions(has_channel=True)
            )
            decode(
                LoadResult,
                await self._request_sandbox(
                    "load_job", build_load_request(self.job), LOAD_TIMEOUT_S
                ),
            )
        answer: Outcomes = decode(
            Outcomes, await self._request_sandbox(method, request, deadline_s)
        )
        return answer.outcomes[0]

    async def _request_sandbox(self, method: str, request: Any, deadline_s: float) -> bytes:
        assert self._sandbox is not None
        await self._sandbox.send(msgpack.packb([method, encode(request)[0]], use_bin_type=True))
        try:
            frame = await self._sandbox.recv(deadline_s)
        except EOFError as error:
            raise ToolFailed("the sandbox has exited", where=str(self.scratch)) from error
        status, *rest = msgpack.unpackb(frame, raw=False)
        if status != "ok":
            raise from_wire(*rest)
        body: bytes = rest[0]
        return body

    async def close(self) -> None:
        for child in (self._environment, self._sandbox):
            if child is not None:
                await stop_child(child)


class LocalTurnPlayer(TurnPlayer):
    """Turns of a trajectory with one local engine, each shown when it is complete."""

    def __init__(self, player: LocalPlayer, trajectory: Trajectory, settings: PlaySettings) -> None:
        # The user ends a conversation; other trajectories end as in training.
        turns = player.job.config.rollout.max_turns if settings.read_input is None else math.inf
        super().__init__(trajectory, player.max_length, turns)
        self._player, self._settings = player, settings

    @property
    def _tokens_left(self) -> int:
        return self._settings.max_new_tokens - _count_sampled(self.trajectory)

    async def generate(self) -> FinishReason:
        token_limit = min(self.max_tokens - self.trajectory.length, self._tokens_left)
        return self._player.generate(self.trajectory, self._settings.temperature, token_limit)

    async def step_environment(self, ids: list[int]) -> tuple[str, str, Any]:
        text, action, value = await self._player.call_environment(
            self.trajectory.group, "step", ids
        )
        return text, action, value

    async def send_tool_result(self, value: Any) -> tuple[str, Any]:
        action, then = await self._player.call_environment(self.trajectory.group, "result", value)
        return action, then

    async def end_early(self, ids: list[int], has_tool_value: bool) -> tuple[str, Any]:
        text, score = await self._player.call_environment(self.trajectory.group, "cut", ids)
        return text, score

    async def call_tool(self, name: str, argument: Any) -> Any:
        t, hear = self.trajectory, self._settings.read_input
        if name == PERSON:
            return await hear() if hear is not None else None
        session_begun = any(
            n == name and (isinstance(value, dict) and value.get("status") in LIVE_SESSION_STATUSES)
            for n, _, value in t.list_tool_calls()
        )
        answer = await self._player.call_tool(name, argument, str(t.id), session_begun)
        assert t.open_turn is not None
        t.open_turn.add_call(name, argument, answer)
        self._settings.show_turn(build_tool_turn(name, argument, answer))
        return answer

    def on_model_turn(self, text: str, *, is_cut: bool = False) -> None:
        self._settings.show_turn(
            {"role": "model", "text": text} | ({"truncated": True} if is_cut else {})
        )

    def on_append(self, ids: list[int], *, is_last: bool = False) -> None:
        self._settings.show_turn(
            {"role": "environment", "text": self._player.tokenizer.decode(ids)}
        )

    def is_full(self, ids: list[int]) -> bool:
        return super().is_full(ids) or self._tokens_left <= 0


def _count_sampled(trajectory: Trajectory) -> int:
    return (
        trajectory.length
        - trajectory.prompt_length
        - sum(turn.appended_tokens for turn in trajectory.all_turns)
    )
