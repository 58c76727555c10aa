"""The turns of a trajectory: the model's, the tools' that its environment calls, and what the
environment appends, until one of them ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from meshrl.common.api.engine import FinishReason
from meshrl.services.rollout.trajectories.failures import TrajectoryFailed
from meshrl.services.rollout.trajectories.trajectory import Trajectory, Turn

MAX_TOOL_CALLS = 1024  # most tool calls in a turn: an environment that asks for more does not end


class TurnPlayer(ABC):
    """The turns of one trajectory of at most `max_tokens` tokens and `max_turns` turns."""

    def __init__(self, trajectory: Trajectory, max_tokens: int, max_turns: float) -> None:
        self.trajectory, self.max_tokens, self.max_turns = trajectory, max_tokens, max_turns

    @abstractmethod
    async def generate(self) -> FinishReason:
        """Samples the model's turn onto the trajectory; STOP, or LENGTH where it was cut."""

    @abstractmethod
    async def step_environment(self, ids: list[int]) -> tuple[str, str, Any]:
        """What the environment does after the model's turn: (its text, action, value)."""

    @abstractmethod
    async def send_tool_result(self, value: Any) -> tuple[str, Any]:
        """What the environment does after a tool's value: (action, value)."""

    @abstractmethod
    async def end_early(self, ids: list[int], has_tool_value: bool) -> tuple[str, float | None]:
        """Ends the environment; what `ids`, its unfinished turn, say, and its score. `answered`: it
        has the value of the last tool.
        """

    @abstractmethod
    async def call_tool(self, name: str, argument: Any) -> Any:
        """The value of a tool that the environment calls, noted in the open turn."""

    @abstractmethod
    def on_model_turn(self, text: str, *, is_cut: bool = False) -> None:
        """The model's turn is known as text."""

    @abstractmethod
    def on_append(self, ids: list[int], *, is_last: bool = False) -> None:
        """The environment has something to append, behind which a turn follows unless `last`."""

    def is_full(self, ids: list[int]) -> bool:
        """Whether there is no room for a turn behind `ids`."""
        return self.trajectory.length + len(ids) >= self.max_tokens

    async def play(self) -> tuple[str, float | None]:
        """(why the trajectory ended: done, length or turns; the environment's own score)."""
        t = self.trajectory
        while True:
            # A turn that the ledger knows to have ended is not asked for again: it may have ended
            # just where there is no room for more.
            if t.open_turn is None and await self.generate() is FinishReason.LENGTH:
                said, score = await self.end_early(t.turn_tokens.tolist(), False)
                t.open_turn = Turn(said, 0, is_cut=True)
                self.on_model_turn(said, is_cut=True)
                return "length", score
            action, value = await self._run_environment()
            if action == "done":
                return "done", value
            if action == "last":
                ids, score = value
                if t.length + len(ids) <= self.max_tokens:
                    t.append_last(ids)
                    self.on_append(ids, is_last=True)
                return "done", score
            spent = len(t.past_turns) + 1 >= self.max_turns
            if spent or self.is_full(value):
                _, score = await self.end_early([], True)
                return "turns" if spent else "length", score
            self.on_append(value)
            t.append(value)

    async def _run_environment(self) -> tuple[str, Any]:
        """What the environment does after the model's turn and the tools that it calls then."""
        t = self.trajectory
        if t.open_turn is not None and t.open_turn.has_tool_value:
            action, value = await self.send_tool_result(t.open_turn.tool_value)
        else:
            t.open_turn = None
            text, action, value = await self.step_environment(t.turn_tokens.tolist())
            t.open_turn = Turn(text, len(t.turn_tokens))
            self.on_model_turn(text)
        while action == "tool":
            if len(t.open_turn.list_calls()) >= MAX_TOOL_CALLS:
                raise TrajectoryFailed(
                    f"the environment asked for over {MAX_TOOL_CALLS} tool calls in a turn",
                    kind="environment calls tools without end",
                )
            name, argument = value
            action, value = await self.send_tool_result(await self.call_tool(name, argument))
        return action, value
