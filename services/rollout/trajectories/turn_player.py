"""Turns of a trajectory: the model's, its environment's tool calls, and the appended text, until
one of them ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from meshrl.common.api.engine import FinishReason
from meshrl.services.rollout.trajectories.failures import TrajectoryFailed
from meshrl.services.rollout.trajectories.trajectory import Trajectory, Turn

MAX_TOOL_CALLS = 1024  # limit of tool calls in a turn, for environments that call tools without end


class TurnPlayer(ABC):
    """Turns of one trajectory of at most `max_tokens` tokens and `max_turns` turns."""

    def __init__(self, trajectory: Trajectory, max_tokens: int, max_turns: float) -> None:
        self.trajectory, self.max_tokens, self.max_turns = trajectory, max_tokens, max_turns

    @abstractmethod
    async def generate(self) -> FinishReason:
        """Sample the model's turn onto the trajectory; return STOP, or LENGTH if it was cut."""

    @abstractmethod
    async def step_environment(self, ids: list[int]) -> tuple[str, str, Any]:
        """Run the environment after the model's turn; return (its text, action, value)."""

    @abstractmethod
    async def send_tool_result(self, value: Any) -> tuple[str, Any]:
        """Send a tool's value to the environment; return (action, value)."""

    @abstractmethod
    async def end_early(self, ids: list[int], has_tool_value: bool) -> tuple[str, Any]:
        """End the environment; return the text of `ids`, its unfinished turn, and its score.
        `has_tool_value`: it has received the value of the last tool.
        """

    @abstractmethod
    async def call_tool(self, name: str, argument: Any) -> Any:
        """Call a tool for the environment, and record the value in the open turn."""

    @abstractmethod
    def on_model_turn(self, text: str, *, is_cut: bool = False) -> None:
        """Handle the text of the model's turn."""

    @abstractmethod
    def on_append(self, ids: list[int], *, is_last: bool = False) -> None:
        """Append the environment's tokens; a turn follows unless `is_last`."""

    def is_full(self, ids: list[int]) -> bool:
        """Return True if no turn fits after `ids`."""
        return self.trajectory.length + len(ids) >= self.max_tokens

    async def play(self) -> tuple[str, Any]:
        """Play to the end; return (reason: done, length or turns; the environment's score)."""
        t = self.trajectory
        while True:
            # A completed turn of the ledger is not generated again: it may have ended
            # at the maximum length.
            if t.open_turn is None and await self.generate() is FinishReason.LENGTH:
                text, score = await self.end_early(t.turn_tokens.tolist(), False)
                t.open_turn = Turn(text, 0, is_cut=True)
                self.on_model_turn(text, is_cut=True)
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
        """Run the environment after the model's turn, with its tool calls; return (action,
        value).
        """
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
                    f"the environment requested more than {MAX_TOOL_CALLS} tool calls in one turn",
                    kind="environment calls tools without end",
                )
            name, argument = value
            action, value = await self.send_tool_result(await self.call_tool(name, argument))
        return action, value
