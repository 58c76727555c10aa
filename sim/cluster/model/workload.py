"""What a job's trajectories are: turns of a length, each followed by a tool that takes its time and
answers something. A trajectory is drawn from its group and its number in it alone, so that what a
policy does changes nothing of it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from meshrl.common.base.random import Random
from meshrl.services.rollout.routing.length_trees import ToolReturn
from meshrl.sim.drift import LinearDrift


@dataclass(frozen=True, slots=True)
class SimTurn:
    """What a model generates, and what comes of it."""

    tokens: float
    tool_s: float = 0.0
    answer_tokens: float = 0.0  # tokens that the tool appends
    tool_return: ToolReturn | None = None  # what the tool's answer stands for; None: no tool


@dataclass(frozen=True, slots=True)
class TrajectoryScript:
    """A trajectory as it will have been, which no policy sees."""

    prompt_tokens: float  # tokens
    turns: Sequence[SimTurn]


class SimWorkload(Protocol):
    """Draws trajectories."""

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        """That of a member of a group that is opened when so much of the run is over, 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormalWorkload:
    """So many turns of lengths whose logarithm is normal, each with the same tool."""

    seed: int
    turns: int
    median_tokens: LinearDrift  # tokens of a turn
    log_sigma: LinearDrift  # deviation of their logarithm
    tool_s: LinearDrift
    prompt_tokens: float = 2.0
    answer_tokens: float = 1.0
    max_tokens: float = math.inf  # tokens of a trajectory; it is cut there

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        random = Random(self.seed).child(f"{group}/{member}")
        left, turns = self.max_tokens, []
        for _ in range(self.turns):
            drawn = self.median_tokens.get_value(progress) * math.exp(
                self.log_sigma.get_value(progress) * random.gauss(0.0, 1.0)
            )
            tokens = min(left, float(max(1, round(drawn))))
            turns.append(SimTurn(tokens, self.tool_s.get_value(progress), self.answer_tokens))
            left -= tokens
            if left <= 0:
                break
        return TrajectoryScript(self.prompt_tokens, turns)


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool may answer, and what follows from it."""

    tool_return: ToolReturn
    weight: float  # beside those of the other answers
    tool_s: float  # that the tool takes
    answer_tokens: float  # that it appends
    end_probability: float  # probability that the turn behind it is the last one
    length_scale: float  # of the lengths of all turns behind it


@dataclass(frozen=True)
class ToolChainWorkload:
    """Turns until a tool's answer is followed by the last one: what remains of a trajectory depends
    on what its tools answer, which is known to nobody before.
    """

    seed: int
    median_tokens: LinearDrift  # tokens of a turn
    log_sigma: LinearDrift
    answers: Sequence[ToolAnswer]
    max_turns: int  # turns
    prompt_tokens: float
    max_tokens: float = math.inf  # tokens of a trajectory; it is cut there

    @cached_property
    def _weights(self) -> Sequence[float]:
        return list(accumulate(one.weight for one in self.answers))

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        random = Random(self.seed).child(f"{group}/{member}")
        left, scale, last = self.max_tokens, 1.0, False
        turns: list[SimTurn] = []
        while left > 0 and len(turns) < self.max_turns:
            drawn = self.median_tokens.get_value(progress) * math.exp(
                self.log_sigma.get_value(progress) * random.gauss(0.0, 1.0)
            )
            tokens = min(left, float(max(1, round(scale * drawn))))
            left -= tokens
            if last:
                turns.append(SimTurn(tokens))
                break
            answer = self.answers[bisect(self._weights, random.random() * self._weights[-1])]
            turns.append(SimTurn(tokens, answer.tool_s, answer.answer_tokens, answer.tool_return))
            scale *= answer.length_scale
            last = random.random() < answer.end_probability
        return TrajectoryScript(self.prompt_tokens, turns)


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Trajectories that were: one after the other, and from the first one again."""

    scripts: Sequence[TrajectoryScript]
    group_size: int  # of a group

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        return self.scripts[(group * self.group_size + member) % len(self.scripts)]
