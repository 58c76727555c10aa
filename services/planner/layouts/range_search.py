"""Search of the furthest group, in order of length, that gangs can serve within a time.

The dynamic programme of Libra's paper asks which makespan g accelerators need for the i shortest.
Here the question is inverted. `table[state]` is the furthest group that the accelerators of
`state`, a count of each pool, can serve within a limit; one more gang continues from there. A gang
that begins further also ends further, so the furthest group is all that a state must record. One
table answers for every supply among its states, so one table judges all training options.

States are ordered by their total, which a gang raises, so one level is computed at once. If there
are too many states, gangs of the largest pools are bundled into `unit` accelerators of one degree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshrl.services.planner.layouts.layout_nodes import AcceleratorPool, Supply
from meshrl.services.planner.layouts.range_costs import RangeEnds

_Index = tuple[int | slice, ...]
MAX_CELLS = 600_000  # maximum cells of tables: about 0.1 s in total


@dataclass(frozen=True, slots=True)
class GangStep:
    """Addition of one gang, or of a bundle of gangs of one degree, from a pool."""

    axis: int  # index of the pool
    size: int  # in units of the pool
    server: int
    gang_count: int  # number of gangs


@dataclass(frozen=True, slots=True)
class GangSpan:
    """Gang of a server and the groups [first, end) that it serves."""

    server: int
    first: int
    end: int


class SupplyStates:
    """States of a table: the used units of each pool."""

    def __init__(
        self, max_supply: Supply, kinds: Sequence[tuple[str, int]], max_cells: int = MAX_CELLS
    ) -> None:
        """Build the states up to `max_supply`. `kinds` are the (kind, degree) of servers. Units are
        doubled until there are at most `max_cells` cells.
        """
        self._merged_into = {pool: pool for pool in max_supply}
        self._max_supply = dict(max_supply)
        self._unit_sizes = dict.fromkeys(max_supply, 1)
        while self.cells > max_cells and self._coarsen():
            pass
        self.pools = sorted(self._max_supply, key=self._count_units)
        self.unit_sizes = [self._unit_sizes[pool] for pool in self.pools]
        self.max_counts = [self._count_units(pool) for pool in self.pools]
        self.steps = [
            GangStep(axis, max(1, degree // unit), server, max(1, unit // degree))
            for axis, ((kind, block), unit) in enumerate(
                zip(self.pools, self.unit_sizes, strict=True)
            )
            for server, (of, degree) in enumerate(kinds)
            if of == kind and degree <= block
        ]

    @property
    def cells(self) -> int:
        """Number of cells of the table: its levels times the states of all pools but the
        largest.
        """
        counts = sorted(map(self._count_units, self._max_supply))
        return (sum(counts) + 1) * prod(count + 1 for count in counts[:-1])

    @property
    def is_exact(self) -> bool:
        """True if gangs are added one by one, wherever they fit."""
        return len(self._max_supply) == len(self._merged_into) and set(
            self._unit_sizes.values()
        ) <= {1}

    def find_state(self, supply: Supply) -> tuple[int, ...]:
        """Return the state of a supply, which must not exceed the largest supply."""
        into: Counter[AcceleratorPool] = Counter()
        for pool, count in supply.items():
            into[self._merged_into[pool]] += count
        return tuple(
            into[pool] // unit for pool, unit in zip(self.pools, self.unit_sizes, strict=True)
        )

    def _count_units(self, pool: AcceleratorPool) -> int:
        return self._max_supply[pool] // self._unit_sizes[pool]

    def _coarsen(self) -> bool:
        """Double a unit, and return False if nothing is left to do. First a unit is a whole block.
        Then blocks of two count as two of one, then a bundle may have several blocks.
        """
        largest = sorted(self._max_supply, key=self._count_units, reverse=True)
        within = [pool for pool in largest if self._unit_sizes[pool] < pool[1]]
        pairs = [
            (kind, 2) for kind, block in largest if block == 1 and (kind, 2) in self._max_supply
        ]
        if not within and pairs:
            self._max_supply[pairs[0][0], 1] += self._max_supply.pop(pairs[0])
            self._merged_into[pairs[0]] = (pairs[0][0], 1)
            return True
        for pool in within or [pool for pool in largest if self._count_units(pool) > 1]:
            self._unit_sizes[pool] *= 2
            return True
        return False


class FurthestTable:
    """Table of one limit. Its last axis, the largest pool, is implied by the level."""

    def __init__(self, states: SupplyStates, reach: Callable[[int], RangeEnds]) -> None:
        """Build the table. `reach` returns the range ends of each server within the limit."""
        self.states = states
        servers = {step.server for step in states.steps}
        self._gang_reach = {server: np.append(reach(server), -1) for server in servers}
        self._step_reach = [
            _repeat_reach(self._gang_reach[step.server], step.gang_count) for step in states.steps
        ]
        axes = len(states.pools) - 1
        self._pads = [
            max((step.size for step in states.steps if step.axis == axis), default=0)
            for axis in range(axes + 1)
        ]
        self._lead_levels = max(self._pads, default=0)
        self._table = self._build_table()

    def find_end(self, state: Sequence[int]) -> int:
        """Return the furthest end from group 0 with at most the accelerators of a state."""
        inner = [used + pad for used, pad in zip(state[:-1], self._pads[:-1], strict=True)]
        return int(self._table[(sum(state) + self._lead_levels, *inner)])

    def find_spans(self, state: Sequence[int]) -> list[GangSpan]:
        """Return the gangs that reach the furthest end, in order of length."""
        found: list[GangSpan] = []
        at = list(state)
        while (end := self.find_end(at)) > 0:
            step, before = self._find_last_step(at, end)
            first, bunch = self.find_end(before), []
            for _ in range(step.gang_count):
                upto = int(self._gang_reach[step.server][first])
                if upto > first:
                    bunch.append(GangSpan(step.server, first, upto))
                first = upto
            found += reversed(bunch)
            at = before
        return found[::-1]

    def _find_last_step(self, state: list[int], end: int) -> tuple[GangStep, list[int]]:
        for step, reach in zip(self.states.steps, self._step_reach, strict=True):
            if state[step.axis] < step.size:
                continue
            before = [*state]
            before[step.axis] -= step.size
            if reach[self.find_end(before)] == end:
                return step, before
        raise AssertionError(f"no gang ends at group {end}")

    def _build_table(self) -> NDArray[np.intp]:
        """Build the table by [level, used units of each other pool]. Padding in front holds -1 for
        invalid states, and a gang reaches -1 from them.
        """
        max_counts = self.states.max_counts
        sizes = [n + 1 for n in max_counts[:-1]]
        levels = sum(max_counts) + 1
        shape = [n + pad for n, pad in zip(sizes, self._pads[:-1], strict=True)]
        table = np.full((levels + self._lead_levels, *shape), -1, np.intp)
        used = np.zeros(sizes, np.intp)
        for axis, n in enumerate(sizes):
            used = used + np.arange(n).reshape([-1 if i == axis else 1 for i in range(len(sizes))])
        moves = [
            (step.size, self._shift_slices(step), reach)
            for step, reach in zip(self.states.steps, self._step_reach, strict=True)
        ]
        inner = tuple(slice(pad, None) for pad in self._pads[:-1])
        for level in range(levels):
            best = np.zeros(sizes, np.intp)
            for size, shifted, reach in moves:
                lower: _Index = (level + self._lead_levels - size, *shifted)
                before = table[lower]
                np.maximum(best, reach[before], out=best)
            best[(used > level) | (level - used > max_counts[-1])] = -1
            here: _Index = (level + self._lead_levels, *inner)
            table[here] = best
        return table

    def _shift_slices(self, step: GangStep) -> tuple[slice, ...]:
        """Return the slices of a lower level from which a step leads on."""
        found = []
        for axis, pad in enumerate(self._pads[:-1]):
            back = step.size if axis == step.axis else 0
            found.append(slice(pad - back, pad - back + self.states.max_counts[axis] + 1))
        return tuple(found)


def _repeat_reach(reach: RangeEnds, times: int) -> RangeEnds:
    """Return the reach of `times` gangs one after the other."""
    found = reach
    for _ in range(times - 1):
        found = reach[found]
    return found


def find_largest_degrees(kinds: Sequence[tuple[str, int]]) -> Mapping[str, int]:
    """Return the largest degree of each kind."""
    found: dict[str, int] = {}
    for kind, degree in kinds:
        found[kind] = max(degree, found.get(kind, 0))
    return found
