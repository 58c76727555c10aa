"""The turns of a trajectory: the model's, the tools' that its environment calls, and what the
environment appends, until one of them ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from meshrl.common.api.engine import Finish
from meshrl.services.rollout.trajectories.failures import TrajectoryFailed
from meshrl.services.rollout.trajectories.trajectory import Trajectory, Turn

CALLS = 1024  # most tool calls in a turn: an environment that asks for more does not end


class TurnPlayer(ABC):
    """The turns of one trajectory of at most `max_tokens` tokens and `max_turns` turns."""

    def __init__(self, t: Trajectory, max_tokens: int, max_turns: float) -> None:
        self.t, self.max_tokens, self.max_turns = t, max_tokens, max_turns

    @abstractmethod
    async def generate(self) -> Finish:
        """Samples the model's turn onto the trajectory; STOP, or LENGTH where it was cut."""

    @abstractmethod
    async def step(self, ids: list[int]) -> tuple[str, str, Any]:
        """What the environment does after the model's turn: (its text, action, value)."""

    @abstractmethod
    async def result(self, value: Any) -> tuple[str, Any]:
        """What the environment does after a tool's value: (action, value)."""

    @abstractmethod
    async def cut(self, ids: list[int], answered: bool) -> tuple[str, float | None]:
        """Ends the environment; what `ids`, its unfinished turn, say, and its score. `answered`: it
        has the value of the last tool.
        """

    @abstractmethod
    async def call(self, name: str, argument: Any) -> Any:
        """The value of a tool that the environment calls, noted in the open turn."""

    @abstractmethod
    def said(self, text: str, *, cut: bool = False) -> None:
        """The model's turn is known as text."""

    @abstractmethod
    def appended(self, ids: list[int], *, last: bool = False) -> None:
        """The environment has something to append, behind which a turn follows unless `last`."""

    def full(self, ids: list[int]) -> bool:
        """Whether there is no room for a turn behind `ids`."""
        return self.t.length + len(ids) >= self.max_tokens

    async def play(self) -> tuple[str, float | None]:
        """(why the trajectory ended: done, length or turns; the environment's own score)."""
        t = self.t
        while True:
            # A turn that the ledger knows to have ended is not asked for again: it may have ended
            # just where there is no room for more.
            if t.open_turn is None and await self.generate() is Finish.LENGTH:
                said, score = await self.cut(t.turn.tolist(), False)
                t.open_turn = Turn(said, 0, cut=True)
                self.said(said, cut=True)
                return "length", score
            action, value = await self._acted()
            if action == "done":
                return "done", value
            if action == "last":
                ids, score = value
                if t.length + len(ids) <= self.max_tokens:
                    t.ended_with(ids)
                    self.appended(ids, last=True)
                return "done", score
            spent = len(t.past_turns) + 1 >= self.max_turns
            if spent or self.full(value):
                _, score = await self.cut([], True)
                return "turns" if spent else "length", score
            self.appended(value)
            t.appended(value)

    async def _acted(self) -> tuple[str, Any]:
        """What the environment does after the model's turn and the tools that it calls then."""
        t = self.t
        if t.open_turn is not None and t.open_turn.answered:
            action, value = await self.result(t.open_turn.value)
        else:
            t.open_turn = None
            text, action, value = await self.step(t.turn.tolist())
            t.open_turn = Turn(text, len(t.turn))
            self.said(text)
        while action == "tool":
            if len(t.open_turn.calls()) >= CALLS:
                raise TrajectoryFailed(
                    f"the environment asked for over {CALLS} tool calls in a turn",
                    kind="environment calls tools without end",
                )
            name, argument = value
            action, value = await self.result(await self.call(name, argument))
        return action, value
