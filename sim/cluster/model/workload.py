"""Workload of a job's trajectories: turns of some length, each followed by a tool with a duration
and an answer. Draws depend only on the group and the member, so policies do not change them.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from meshrl.common.base.random import Random
from meshrl.services.rollout.routing.length_trees import ToolReturn
from meshrl.sim.drift import LinearDrift


@dataclass(frozen=True, slots=True)
class SimTurn:
    """Generated turn with its tool call."""

    tokens: float
    tool_s: float = 0.0
    answer_tokens: float = 0.0  # tokens that the tool appends
    tool_return: ToolReturn | None = None  # classified answer of the tool; None: no tool


@dataclass(frozen=True, slots=True)
class TrajectoryScript:
    """Script of a trajectory, unknown to all policies."""

    prompt_tokens: float  # tokens
    turns: Sequence[SimTurn]


@dataclass(slots=True)
class SimGroup:
    """Trajectories of one prompt."""

    number: int
    prompt_index: int
    opened_version: int  # at its opening
    missing_members: int  # members in progress
    passed_over: int = 0  # number of steps made of younger groups
    oldest_version: int = 1 << 30  # version of its oldest token
    member_tokens: list[float] = field(default_factory=list)  # of each finished member


class SimWorkload(Protocol):
    """Source of trajectories."""

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        """Draw the script of a member of a group that is opened at `progress` of the run, 0 to
        1.
        """
        ...


@dataclass(frozen=True, slots=True)
class LogNormalWorkload:
    """Workload with a fixed number of turns of log-normal lengths, each with the same tool."""

    seed: int
    turns: int
    median_tokens: LinearDrift  # tokens of a turn
    log_sigma: LinearDrift  # standard deviation of their logarithm
    tool_s: LinearDrift
    prompt_tokens: float = 2.0
    answer_tokens: float = 1.0
    max_tokens: float = math.inf  # tokens of a trajectory, which is cut there
    group_share: float = 0.0  # share of the logarithm's variance that a group's members share

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        random = Random(self.seed).child(f"{group}/{member}")
        common, own = math.sqrt(self.group_share), math.sqrt(1 - self.group_share)
        if common:
            common *= Random(self.seed).child(f"{group}").gauss(0.0, 1.0)
        remaining, turns = self.max_tokens, []
        for _ in range(self.turns):
            drawn = self.median_tokens.get_value(progress) * math.exp(
                self.log_sigma.get_value(progress) * (common + own * random.gauss(0.0, 1.0))
            )
            tokens = min(remaining, float(max(1, round(drawn))))
            turns.append(SimTurn(tokens, self.tool_s.get_value(progress), self.answer_tokens))
            remaining -= tokens
            if remaining <= 0:
                break
        return TrajectoryScript(self.prompt_tokens, turns)


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """Possible answer of a tool, and its consequences."""

    tool_return: ToolReturn
    weight: float  # relative to the other answers
    tool_s: float  # duration of the tool
    answer_tokens: float  # appended tokens
    end_probability: float  # probability that the next turn is the last one
    length_scale: float  # factor of the lengths of all later turns


@dataclass(frozen=True)
class ToolChainWorkload:
    """Workload of turns until a tool's answer leads to the last one. The remaining length depends
    on future tool answers.
    """

    seed: int
    median_tokens: LinearDrift  # tokens of a turn
    log_sigma: LinearDrift
    answers: Sequence[ToolAnswer]
    max_turns: int  # turns
    prompt_tokens: float
    max_tokens: float = math.inf  # tokens of a trajectory, which is cut there

    @cached_property
    def _weights(self) -> Sequence[float]:
        return list(accumulate(one.weight for one in self.answers))

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        random = Random(self.seed).child(f"{group}/{member}")
        remaining, scale, last = self.max_tokens, 1.0, False
        turns: list[SimTurn] = []
        while remaining > 0 and len(turns) < self.max_turns:
            drawn = self.median_tokens.get_value(progress) * math.exp(
                self.log_sigma.get_value(progress) * random.gauss(0.0, 1.0)
            )
            tokens = min(remaining, float(max(1, round(scale * drawn))))
            remaining -= tokens
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
    """Recorded trajectories in their order, repeated cyclically."""

    scripts: Sequence[TrajectoryScript]
    group_size: int  # of a group

    def draw_script(self, group: int, member: int, progress: float) -> TrajectoryScript:
        return self.scripts[(group * self.group_size + member) % len(self.scripts)]
