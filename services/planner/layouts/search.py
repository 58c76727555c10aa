"""How far in order of length gangs of given accelerators can serve everything within a time.

The dynamic programme of Libra's paper asks which makespan g accelerators need for the i shortest.
It is turned around here: `table[state]` is the furthest group that the accelerators of `state`, so
many of each pool, can serve within a limit; one more gang carries on from there. As a gang that
begins further gets further, the furthest is all that needs to be known of a state. One table
answers for every supply that it has states of: all ways to train are judged by the same one.

States lie by their total, which a gang raises: a level of them is computed at once. Where there are
too many, gangs of the largest pools come in bunches of `unit` accelerators of one degree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshrl.services.planner.layouts.nodes import Pool, Supply
from meshrl.services.planner.layouts.serving import Positions

_Index = tuple[int | slice, ...]
CELLS = 600_000  # of tables at most: some 0.1 s together


@dataclass(frozen=True, slots=True)
class GangStep:
    """One more gang, or a bunch of gangs of one degree, of a pool."""

    axis: int  # the pool
    size: int  # in units of the pool
    server: int
    bunch: int  # gangs


@dataclass(frozen=True, slots=True)
class GangSpan:
    """A gang of a server and the groups [first, end) that it serves."""

    server: int
    first: int
    end: int


class States:
    """The states of a table: how much of each pool is used, in units of its own."""

    def __init__(self, most: Supply, kinds: Sequence[tuple[str, int]], limit: int = CELLS) -> None:
        """`most` of each pool; `kinds` are the (kind, degree) of servers. Units are doubled until
        there are no more than `limit` cells."""
        self._into = {pool: pool for pool in most}
        self._most = dict(most)
        self._units = dict.fromkeys(most, 1)
        while self.cells > limit and self._coarser():
            pass
        self.pools = sorted(self._most, key=self._count)
        self.units = [self._units[pool] for pool in self.pools]
        self.most = [self._count(pool) for pool in self.pools]
        self.steps = [
            GangStep(axis, max(1, degree // unit), server, max(1, unit // degree))
            for axis, ((kind, block), unit) in enumerate(zip(self.pools, self.units, strict=True))
            for server, (of, degree) in enumerate(kinds)
            if of == kind and degree <= block
        ]

    @property
    def cells(self) -> int:
        """Of the table: its levels, and in each the states of all pools but the largest."""
        counts = sorted(map(self._count, self._most))
        return (sum(counts) + 1) * prod(count + 1 for count in counts[:-1])

    @property
    def exact(self) -> bool:
        """Whether gangs come one by one, wherever they fit."""
        return len(self._most) == len(self._into) and set(self._units.values()) <= {1}

    def of(self, have: Supply) -> tuple[int, ...]:
        """The state of a supply, which has no more of any pool than the largest."""
        into: Counter[Pool] = Counter()
        for pool, count in have.items():
            into[self._into[pool]] += count
        return tuple(into[pool] // unit for pool, unit in zip(self.pools, self.units, strict=True))

    def _count(self, pool: Pool) -> int:
        return self._most[pool] // self._units[pool]

    def _coarser(self) -> bool:
        """Takes a unit twice as large: one of whole blocks at first. Then blocks of two count as
        two of one, then a bunch may be of several blocks. False when nothing is left to do.
        """
        largest = sorted(self._most, key=self._count, reverse=True)
        within = [pool for pool in largest if self._units[pool] < pool[1]]
        pairs = [(kind, 2) for kind, block in largest if block == 1 and (kind, 2) in self._most]
        if not within and pairs:
            self._most[pairs[0][0], 1] += self._most.pop(pairs[0])
            self._into[pairs[0]] = (pairs[0][0], 1)
            return True
        for pool in within or [pool for pool in largest if self._count(pool) > 1]:
            self._units[pool] *= 2
            return True
        return False


class Furthest:
    """The table of one limit. Its last axis, the largest pool, is not stored but told by level."""

    def __init__(self, states: States, reach: Callable[[int], Positions]) -> None:
        """`reach` is that of each server within the limit."""
        self.states = states
        self._single = {step.server: np.append(reach(step.server), -1) for step in states.steps}
        self._reach = [_repeated(self._single[step.server], step.bunch) for step in states.steps]
        axes = len(states.pools) - 1
        self._pads = [
            max((step.size for step in states.steps if step.axis == axis), default=0)
            for axis in range(axes + 1)
        ]
        self._lead = max(self._pads, default=0)
        self._table = self._filled()

    def end(self, state: Sequence[int]) -> int:
        """The furthest end from group 0 on, with no more than the accelerators of a state."""
        inner = [used + pad for used, pad in zip(state[:-1], self._pads[:-1], strict=True)]
        return int(self._table[(sum(state) + self._lead, *inner)])

    def spans(self, state: Sequence[int]) -> list[GangSpan]:
        """The gangs that get there, in order of length."""
        found: list[GangSpan] = []
        at = list(state)
        while (end := self.end(at)) > 0:
            step, before = self._last(at, end)
            first, bunch = self.end(before), []
            for _ in range(step.bunch):
                upto = int(self._single[step.server][first])
                if upto > first:
                    bunch.append(GangSpan(step.server, first, upto))
                first = upto
            found += reversed(bunch)
            at = before
        return found[::-1]

    def _last(self, state: list[int], end: int) -> tuple[GangStep, list[int]]:
        for step, reach in zip(self.states.steps, self._reach, strict=True):
            if state[step.axis] < step.size:
                continue
            before = [*state]
            before[step.axis] -= step.size
            if reach[self.end(before)] == end:
                return step, before
        raise AssertionError(f"no gang leads to group {end}")

    def _filled(self) -> NDArray[np.intp]:
        """The table by [level, used of each other pool], with room in front for steps from states
        that are none: those are at -1, and so is what a gang reaches from there.
        """
        most = self.states.most
        sizes = [n + 1 for n in most[:-1]]
        levels = sum(most) + 1
        shape = [n + pad for n, pad in zip(sizes, self._pads[:-1], strict=True)]
        table = np.full((levels + self._lead, *shape), -1, np.intp)
        used = np.zeros(sizes, np.intp)
        for axis, n in enumerate(sizes):
            used = used + np.arange(n).reshape([-1 if i == axis else 1 for i in range(len(sizes))])
        moves = [
            (step.size, self._shifted(step), reach)
            for step, reach in zip(self.states.steps, self._reach, strict=True)
        ]
        inner = tuple(slice(pad, None) for pad in self._pads[:-1])
        for level in range(levels):
            best = np.zeros(sizes, np.intp)
            for size, shifted, reach in moves:
                lower: _Index = (level + self._lead - size, *shifted)
                before = table[lower]
                np.maximum(best, reach[before], out=best)
            best[(used > level) | (level - used > most[-1])] = -1
            here: _Index = (level + self._lead, *inner)
            table[here] = best
        return table

    def _shifted(self, step: GangStep) -> tuple[slice, ...]:
        """Where, in a lower level, the states stand that a step leads on from."""
        found = []
        for axis, pad in enumerate(self._pads[:-1]):
            back = step.size if axis == step.axis else 0
            found.append(slice(pad - back, pad - back + self.states.most[axis] + 1))
        return tuple(found)


def _repeated(reach: Positions, times: int) -> Positions:
    """The reach of so many gangs one after the other."""
    found = reach
    for _ in range(times - 1):
        found = reach[found]
    return found


def largest_degrees(kinds: Sequence[tuple[str, int]]) -> Mapping[str, int]:
    """The largest degree of each kind."""
    found: dict[str, int] = {}
    for kind, degree in kinds:
        found[kind] = max(degree, found.get(kind, 0))
    return found
