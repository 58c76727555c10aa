"""Plays trajectories with one engine in this process, the job's environment and its tools, and no
mesh.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import torch

from meshrl.common.api.engine import Finish
from meshrl.common.api.sandbox import (
    OK,
    CallOutcome,
    Loaded,
    Outcomes,
    RewardBatch,
    RewardCall,
    RunTools,
    ToolCall,
)
from meshrl.common.base.encoding.messages import decode, encode
from meshrl.common.base.errors import MeshError, Refused, ToolFailed, from_wire
from meshrl.common.generation.builtin.build import TorchEngine, build
from meshrl.common.generation.contract import Request
from meshrl.common.job.builtin import PERSON
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.starting import Spawning
from meshrl.common.model.files.rows import load_model
from meshrl.common.model.tokens.tokenizer import Tokenizer, with_tokenizer
from meshrl.services.rollout.environments.pool import command
from meshrl.services.rollout.environments.process import START_S, answer_of, dismissed, message_of
from meshrl.services.rollout.rewards.sandboxes import KEPT, load_request
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.services.rollout.trajectories.transcript import Transcript, stop_ids, tool_turn
from meshrl.services.rollout.trajectories.turns import TurnPlayer

CONVERSATION = 4096  # tokens of a conversation, where the model has positions for so many
CONVERSE = "meshrl.services.environment.person:conversation"
LOAD_S = 120.0  # for the sandbox to import the job's modules

Hear = Callable[[], Awaitable[str | None]]  # what the person says; None: nothing more
Show = Callable[[dict[str, Any]], None]  # a turn, as rewards get it, when it has happened


@dataclass(frozen=True)
class PlaySettings:
    """How a trajectory is played."""

    temperature: float
    most_new: int  # tokens that the model samples of it
    show: Show
    hear: Hear | None = None  # None: nobody is asked


@dataclass
class Played:
    """A trajectory that is over."""

    prompt: str
    turns: list[dict[str, Any]]
    reason: str  # done, length or turns
    score: float | None  # the environment's own, or the job's reward; None: neither has one
    tokens: int = 0  # of all of it, the prompt and what was appended included
    sampled: int = 0  # of these, by the model


class Partner:
    """The model of a directory in a job. `converse`: trajectories are conversations with a
    person, whatever environment the job names.
    """

    def __init__(
        self, host: Host, job: JobData, model: Path, scratch: Path, *, converse: bool
    ) -> None:
        if converse:
            environment = replace(job.config.environment, use=CONVERSE)
            dataset = replace(job.config.dataset, prompt="prompt")
            job = replace(job, config=replace(job.config, environment=environment, dataset=dataset))
        self.host, self.job, self.scratch = host, job, scratch
        self.tokenizer = Tokenizer.load(str(job.tokenizer))
        rollout = job.config.rollout
        shape, decoder = load_model(model)
        wanted = max(rollout.max_tokens, CONVERSATION) if converse else rollout.max_tokens
        self.most = min(wanted, shape.max_positions)
        self.stop = tuple(stop_ids(self.tokenizer, rollout.stop))
        self.transcript = Transcript(self.tokenizer.decode, self.stop, rollout.stop_text)
        torch.set_num_threads(1)
        self._engine: TorchEngine = build(
            with_tokenizer(shape, job.tokenizer),
            1,
            self.most,
            path=rollout.path,
            dtype=rollout.dtype,
            decode=self.tokenizer.decode,
        )
        self._engine.wake(decoder.state_dict(), 0)
        self._environment: Child | None = None
        self._sandbox: Child | None = None
        self._fresh = True

    async def play(
        self,
        key: int,
        row: dict[str, Any],
        temperature: float,
        seed: int,
        show: Show,
        hear: Hear | None = None,
        reward: bool = False,
        most_new: int | None = None,
    ) -> Played:
        """A trajectory of a row to its end; each turn is shown when it has happened. Without
        `hear` a conversation ends after the model's first answer. `reward`: the job's is computed.
        The model samples `most_new` tokens of it at most; None: as many as there is room for.

        ToolFailed when the environment, a tool or the reward fails; Refused when the prompt leaves
        no room.
        """
        t = Trajectory(key, 0, 0, 0, seed)
        t.begin(await self.ask(key, "begin", row))
        if t.length >= self.most:
            raise Refused(
                f"the prompt is too long: it has {t.length} tokens, and a trajectory at most "
                f"{self.most}",
                fix="Shorten it; rollout.max_tokens of the job, or the model's positions, say so",
            )
        show({"role": "prompt", "text": self.transcript.prompt(t)})
        most_new = self.most if most_new is None else most_new
        turns_of = PartnerTurns(self, t, PlaySettings(temperature, most_new, show, hear))
        reason, score = await turns_of.play()
        await self.ask(key, "close", None)
        turns = self.transcript.turns(t, reason)
        if reward and self.job.config.reward.declared:
            score = await self.reward(row, turns)
        return Played(self.transcript.prompt(t), turns, reason, score, t.length, _sampled(t))

    def generate(self, t: Trajectory, temperature: float, most: int) -> Finish:
        """Samples a turn of the model of `most` tokens onto the trajectory; why it ended."""
        rollout = self.job.config.rollout
        request = Request(
            id=t.id,
            tokens=t.tokens.copy(),
            max_new=most,
            temperature=temperature,
            stop_ids=self.stop,
            seed=t.seed,
            session=t.id,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_text=tuple(rollout.stop_text),
        )
        self._engine.submit([request])
        finish = Finish.RUNNING
        while finish is Finish.RUNNING:
            self._engine.step()
            flush = self._engine.drain()
            if flush is not None:
                t.sampled(flush.tokens, flush.logprobs, flush.versions)
                finish = Finish(int(flush.finish[-1]))
        return finish

    async def ask(self, key: int, operation: str, argument: Any) -> Any:
        deadline_s = self.job.config.environment.step_deadline_s
        log = self.scratch / "environment.log"
        if self._environment is None:
            argv = command(self.job)
            self._environment = self.host.spawn(
                argv, name="environment", log=log, how=Spawning(pipe=True, guarded=True)
            )
            deadline_s += START_S
        message = message_of((key, operation, argument), operation, "environment")
        if not isinstance(message, bytes):
            raise message
        try:
            await self._environment.send(msgpack.Packer().pack_array_header(1) + message)
            told = msgpack.unpackb(await self._environment.recv(deadline_s), raw=False)
        except (OSError, EOFError, MeshError) as error:
            lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
            said = lines[-1] if lines else ""
            raise ToolFailed(
                f"the environment did not answer {operation}(): {said or error}",
                fix="See the job's module",
            ) from error
        [[_, status, value]] = told
        answer = answer_of(status, value, "environment")
        if isinstance(answer, MeshError):
            raise answer
        return answer

    async def tool(self, name: str, argument: Any, session: str, begun: bool) -> Any:
        config = self.job.config
        if name not in config.environment.tools:
            known = ", ".join(sorted(config.environment.tools)) or "none"
            raise ToolFailed(f"no tool is called {name!r}", fix=f"The job names: {known}")
        deadline_s = max(config.environment.tool_deadline_s, config.sandbox.wall_s)
        call = ToolCall(0, self.job.id, name, argument, deadline_s, session, begun)
        outcome = await self._sandboxed("run", RunTools([call]), 5 * deadline_s)
        if outcome.status != OK and outcome.value is None:
            raise ToolFailed(f"tool {name}: {outcome.status}: {outcome.error}")
        return outcome.value

    async def reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        """What the job's reward gives for a trajectory of a row. ToolFailed when it fails."""
        deadline_s = self.job.config.reward.deadline_s
        call = RewardCall(0, self.job.id, row, turns, deadline_s)
        outcome = await self._sandboxed("score", RewardBatch([call]), 5 * deadline_s)
        if outcome.status != OK:
            raise ToolFailed(f"the reward: {outcome.status}: {outcome.error}")
        return float(outcome.value)

    async def _sandboxed(self, method: str, request: Any, deadline_s: float) -> CallOutcome:
        if self._sandbox is None:
            argv = [sys.executable, "-m", "meshrl.services.sandbox.alone"]
            log = self.scratch / "sandbox.log"
            self._sandbox = self.host.spawn(argv, name="sandbox", log=log, how=Spawning(pipe=True))
            decode(Loaded, await self._asked("load", load_request(self.job), LOAD_S))
        answer: Outcomes = decode(Outcomes, await self._asked(method, request, deadline_s))
        return answer.outcomes[0]

    async def _asked(self, method: str, request: Any, deadline_s: float) -> bytes:
        assert self._sandbox is not None
        await self._sandbox.send(msgpack.packb([method, encode(request)[0]], use_bin_type=True))
        try:
            frame = await self._sandbox.recv(deadline_s)
        except EOFError as error:
            raise ToolFailed("the sandbox has ended", where=str(self.scratch)) from error
        status, *rest = msgpack.unpackb(frame, raw=False)
        if status != "ok":
            raise from_wire(*rest)
        body: bytes = rest[0]
        return body

    async def close(self) -> None:
        for child in (self._environment, self._sandbox):
            if child is not None:
                await dismissed(child)


class PartnerTurns(TurnPlayer):
    """The turns of a trajectory with one engine here, each shown when it has happened."""

    def __init__(self, partner: Partner, t: Trajectory, told: PlaySettings) -> None:
        # A person says when a conversation ends; other trajectories are as in training.
        turns = partner.job.config.rollout.max_turns if told.hear is None else math.inf
        super().__init__(t, partner.most, turns)
        self._partner, self._told = partner, told

    @property
    def _room(self) -> int:
        return self._told.most_new - _sampled(self.t)

    async def generate(self) -> Finish:
        most = min(self.max_tokens - self.t.length, self._room)
        return self._partner.generate(self.t, self._told.temperature, most)

    async def step(self, ids: list[int]) -> tuple[str, str, Any]:
        text, action, value = await self._partner.ask(self.t.group, "step", ids)
        return text, action, value

    async def result(self, value: Any) -> tuple[str, Any]:
        action, then = await self._partner.ask(self.t.group, "result", value)
        return action, then

    async def cut(self, ids: list[int], answered: bool) -> tuple[str, float | None]:
        said, score = await self._partner.ask(self.t.group, "cut", ids)
        return said, score

    async def call(self, name: str, argument: Any) -> Any:
        t, hear = self.t, self._told.hear
        if name == PERSON:
            return await hear() if hear is not None else None
        begun = any(
            n == name and (isinstance(value, dict) and value.get("status") in KEPT)
            for n, _, value in t.called()
        )
        answer = await self._partner.tool(name, argument, str(t.id), begun)
        assert t.open_turn is not None
        t.open_turn.called(name, argument, answer)
        self._told.show(tool_turn(name, argument, answer))
        return answer

    def said(self, text: str, *, cut: bool = False) -> None:
        self._told.show({"role": "model", "text": text} | ({"truncated": True} if cut else {}))

    def appended(self, ids: list[int], *, last: bool = False) -> None:
        self._told.show({"role": "environment", "text": self._partner.tokenizer.decode(ids)})

    def full(self, ids: list[int]) -> bool:
        return super().full(ids) or self._room <= 0


def _sampled(t: Trajectory) -> int:
    return t.length - t.prompt_length - sum(turn.appended for turn in t.every_turn)
