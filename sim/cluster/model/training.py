"""A job's training: the staleness gate, the groups of a step, and the steps, which take what the
planner's cost model says (`services/planner/costs/training.py`), or the pace that a job declares.

The gate and the choice of groups are those of `common/state/redis/scripts/groups` (`admit`,
`lease_groups`) and `steps/commit_step`, as a mesh runs them in Redis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from meshrl.common.hardware.profiles import Accelerator
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.job.pace import TrainingPace
from meshrl.common.state.pool.demand.measured import MeasuredWork
from meshrl.kernels.packing import pack_rounds
from meshrl.services.planner.costs.training import TrainingLayout, TrainingWork, step_s
from meshrl.sim.cluster.model.agenda import Agenda

MANY = 64  # micro-batches over which the filling of a pipeline is spread


class TrainingSpeed(Protocol):
    """How fast a job trains."""

    def replicas(self, workers: int, core: bool) -> int:
        """Copies of the model that so many workers of a resident compute with."""
        ...

    def update_s(self) -> float:
        """Seconds of a step that nobody shares."""
        ...

    def bins_s(self, tokens: Sequence[float]) -> Sequence[float]:
        """Seconds of the gradients of a group's trajectories, of so many tokens each: of every
        piece that one replica computes.
        """
        ...


@dataclass(frozen=True)
class ModelTraining:
    """A core of `layout`; a helper computes with a copy of the model on its own workers."""

    shape: ModelShape
    on: Accelerator
    layout: TrainingLayout

    def replicas(self, workers: int, core: bool) -> int:
        return self.layout.data if core else 1

    def update_s(self) -> float:
        """Exchange of gradients and update: what a step without tokens takes."""
        return self._empty_s

    def bins_s(self, tokens: Sequence[float]) -> Sequence[float]:
        """A trajectory each, as one of many in its pipeline, with its part of the filling."""
        every = [TrainingWork(MANY, MANY * one, MANY * one * one) for one in tokens]
        taken = [step_s(self.shape, self.on, self._replica, work) for work in every]
        return [(one_s - self._idle_s) / MANY for one_s in taken]

    @cached_property
    def _empty_s(self) -> float:
        return step_s(self.shape, self.on, self.layout, TrainingWork(self.layout.data, 0.0, 0.0))

    @cached_property
    def _replica(self) -> TrainingLayout:
        return replace(self.layout, data=1, sharded=False)

    @cached_property
    def _idle_s(self) -> float:
        return step_s(self.shape, self.on, self._replica, TrainingWork(1, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class PacedTraining:
    """Of trainers that imitate a pace: a worker computes whole bins, one after the other."""

    pace: TrainingPace
    bin_tokens: int

    def replicas(self, workers: int, core: bool) -> int:
        return workers

    def update_s(self) -> float:
        return self.pace.update_s

    def bins_s(self, tokens: Sequence[float]) -> Sequence[float]:
        return [one / self.pace.tokens_per_s for one in packed(tokens, self.bin_tokens)]


def packed(tokens: Sequence[float], most: int) -> list[float]:
    """Tokens of each bin, as trainers pack them."""
    places = sorted(map(round, tokens), reverse=True)
    return [float(sum(places[i] for i in bin)) for (bin,) in pack_rounds(places, most)]


@dataclass(slots=True)
class SimGroup:
    """Trajectories of one prompt."""

    number: int
    prompt: int
    version: int  # at which it was opened
    missing: int  # members under way
    passed: int = 0  # steps that were made of younger groups
    oldest: int = 1 << 30  # version of its oldest token
    tokens: list[float] = field(default_factory=list)  # of each member that has ended


class SimTraining:
    """The core of a job and its helpers."""

    def __init__(
        self,
        agenda: Agenda,
        trains: TrainingSpeed,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        steps: int,
        committed: Callable[[], None],
        switch_s: float | None = None,
    ) -> None:
        """`committed` is told of each step. With `switch_s` a step begins so long after all of its
        groups are there, as of accelerators that generated them; without, each is computed as it
        comes.
        """
        self.version = 0
        self.ended_s: list[float] = []  # when each step was committed
        self.requeued = 0  # trajectories that came back too old
        self._agenda, self._trains, self._committed = agenda, trains, committed
        self._wanted, self._size = groups_per_step, group_size
        self._staleness, self._steps = max_staleness, steps
        self._switch_s = switch_s
        self._admitted = self._next = self._cursor = 0
        self._again: deque[tuple[int, int]] = deque()  # prompts given back, how often passed over
        self._open: dict[int, SimGroup] = {}
        self._ready: dict[int, SimGroup] = {}
        self._since_s = agenda.now_s  # when it began to train, or to wait
        self._free_s: dict[
            tuple[str, int], float
        ] = {}  # when each replica has computed what it was given,
        self._computed_s = 0.0  # and all of them,
        self._leased: list[SimGroup] = []  # of the groups of the step so far;
        self._whole = False  # these are all
        self._step = 0  # that is being made, begun ones counted
        self._waited_s = 0.0  # for them
        self._done = MeasuredWork()

    @property
    def over(self) -> bool:
        return self.version >= self._steps

    @property
    def capacity(self) -> int:
        """Groups that the gate lets through now."""
        steps = min(self._staleness + self.version + 1, self._steps)
        return max(0, steps * self._wanted - self._admitted)

    def admit(self, want: int) -> list[SimGroup]:
        """Opens up to so many groups, as many as the gate lets through."""
        found = []
        for _ in range(min(want, self.capacity)):
            if self._again:
                prompt, passed = self._again.popleft()
            else:
                prompt, passed = self._cursor, 0
                self._cursor += 1
            group = SimGroup(self._next, prompt, self.version, self._size, passed)
            self._open[group.number] = group
            self._next += 1
            self._admitted += 1
            found.append(group)
        return found

    def ended(self, number: int, oldest: int, tokens: float) -> bool:
        """A trajectory has ended, of so many tokens with its prompt; whether its group is whole."""
        group = self._open[number]
        group.missing -= 1
        group.oldest = min(group.oldest, oldest)
        group.tokens.append(tokens)
        if group.missing:
            return False
        self._ready[number] = self._open.pop(number)
        self.lease()
        return True

    def attend(self, resident: str, replicas: int) -> None:
        """So many replicas of the model compute gradients from now on."""
        for number in range(replicas):
            self._free_s[resident, number] = self._agenda.now_s
        self.lease()

    def dismiss(self, resident: str) -> None:
        """Its replicas compute no more. What they have begun they end."""
        for key in [key for key in self._free_s if key[0] == resident]:
            del self._free_s[key]

    def lose(self) -> None:
        """The core has ended in the middle of a step, whose groups are there for the next one."""
        self._ready.update((group.number, group) for group in self._leased)
        self._leased, self._whole, self._computed_s = [], False, self._agenda.now_s
        self._step += 1

    def lease(self) -> None:
        """Takes groups of the step that are there, and hands their pieces to who is free first:
        gradients are computed while further groups are waited for.
        """
        if self.over or self._whole or not self._free_s:
            return
        for group in self._chosen():
            del self._ready[group.number]
            self._leased.append(group)
            if self._switch_s is None:
                self._compute(group, self._agenda.now_s)
        if len(self._leased) == self._wanted:
            now_s = self._agenda.now_s
            if self._switch_s is not None:
                for group in self._leased:
                    self._compute(group, now_s + self._switch_s)
            self._whole = True
            self._waited_s = now_s - self._since_s
            ends_s = max(now_s, self._computed_s) + self._trains.update_s()
            self._agenda.at(ends_s, partial(self._commit, self._step))

    def _compute(self, group: SimGroup, from_s: float) -> None:
        for piece_s in self._trains.bins_s(group.tokens):
            first = min(self._free_s, key=lambda one: self._free_s[one])
            self._free_s[first] = max(from_s, self._free_s[first]) + piece_s
            self._computed_s = max(self._computed_s, self._free_s[first])
            self._done += MeasuredWork(work_s=piece_s)
        self._done += MeasuredWork(tokens=sum(group.tokens))

    @property
    def work(self) -> MeasuredWork:
        return self._done

    def _chosen(self) -> list[SimGroup]:
        """Ready groups that the step takes now, oldest first; what is too old gives its prompt
        back. A place is kept for each open group that may be passed over no more.
        """
        late = sum(group.passed >= self._staleness for group in self._open.values())
        places = self._wanted - len(self._leased)
        places -= min(late, places)
        chosen: list[SimGroup] = []
        for number in sorted(self._ready):
            if len(chosen) == places:
                break
            group = self._ready[number]
            if self.version - group.oldest > self._staleness:
                del self._ready[number]
                self._again.append((group.prompt, group.passed))
                self._admitted -= 1
                self.requeued += self._size
                continue
            chosen.append(group)
        return chosen

    def _commit(self, step: int) -> None:
        if step != self._step:
            return  # its core has ended meanwhile
        self._step += 1
        now_s = self._agenda.now_s
        newest = max(group.number for group in self._leased)
        for number, group in self._open.items():
            group.passed += number < newest
        busy_s = now_s - self._since_s - self._waited_s
        self._done += MeasuredWork(steps=1.0, busy_s=busy_s, wait_s=self._waited_s)
        self._leased, self._whole, self._since_s = [], False, now_s
        self.version += 1
        self.ended_s.append(now_s)
        self.lease()
        self._committed()
