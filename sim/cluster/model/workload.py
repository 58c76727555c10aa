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
from meshrl.services.rollout.routing.lengths import ToolReturn
from meshrl.sim.drift import Drift


@dataclass(frozen=True, slots=True)
class SimTurn:
    """What a model generates, and what comes of it."""

    tokens: float
    tool_s: float = 0.0
    answer: float = 0.0  # tokens that the tool appends
    returned: ToolReturn | None = None  # what the tool's answer stands for; None: no tool


@dataclass(frozen=True, slots=True)
class Script:
    """A trajectory as it will have been, which no policy sees."""

    prompt: float  # tokens
    turns: Sequence[SimTurn]


class SimWorkload(Protocol):
    """Draws trajectories."""

    def script(self, group: int, member: int, share: float) -> Script:
        """That of a member of a group that is opened when so much of the run is over, 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """So many turns of lengths whose logarithm is normal, each with the same tool."""

    seed: int
    turns: int
    median: Drift  # tokens of a turn
    sigma: Drift  # deviation of their logarithm
    tool_s: Drift
    prompt: float = 2.0
    answer: float = 1.0
    longest: float = math.inf  # tokens of a trajectory; it is cut there

    def script(self, group: int, member: int, share: float) -> Script:
        random = Random(self.seed).child(f"{group}/{member}")
        left, turns = self.longest, []
        for _ in range(self.turns):
            drawn = self.median.at(share) * math.exp(self.sigma.at(share) * random.gauss(0.0, 1.0))
            tokens = min(left, float(max(1, round(drawn))))
            turns.append(SimTurn(tokens, self.tool_s.at(share), self.answer))
            left -= tokens
            if left <= 0:
                break
        return Script(self.prompt, turns)


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool may answer, and what follows from it."""

    returned: ToolReturn
    weight: float  # beside those of the other answers
    seconds: float  # that the tool takes
    tokens: float  # that it appends
    ends: float  # probability that the turn behind it is the last one
    scale: float  # of the lengths of all turns behind it


@dataclass(frozen=True)
class Chain:
    """Turns until a tool's answer is followed by the last one: what remains of a trajectory depends
    on what its tools answer, which is known to nobody before.
    """

    seed: int
    median: Drift  # tokens of a turn
    sigma: Drift
    answers: Sequence[ToolAnswer]
    most: int  # turns
    prompt: float
    longest: float = math.inf  # tokens of a trajectory; it is cut there

    @cached_property
    def _weights(self) -> Sequence[float]:
        return list(accumulate(one.weight for one in self.answers))

    def script(self, group: int, member: int, share: float) -> Script:
        random = Random(self.seed).child(f"{group}/{member}")
        left, scale, last = self.longest, 1.0, False
        turns: list[SimTurn] = []
        while left > 0 and len(turns) < self.most:
            drawn = self.median.at(share) * math.exp(self.sigma.at(share) * random.gauss(0.0, 1.0))
            tokens = min(left, float(max(1, round(scale * drawn))))
            left -= tokens
            if last:
                turns.append(SimTurn(tokens))
                break
            answer = self.answers[bisect(self._weights, random.random() * self._weights[-1])]
            turns.append(SimTurn(tokens, answer.seconds, answer.tokens, answer.returned))
            scale *= answer.scale
            last = random.random() < answer.ends
        return Script(self.prompt, turns)


@dataclass(frozen=True, slots=True)
class Trace:
    """Trajectories that were: one after the other, and from the first one again."""

    scripts: Sequence[Script]
    size: int  # of a group

    def script(self, group: int, member: int, share: float) -> Script:
        return self.scripts[(group * self.size + member) % len(self.scripts)]
