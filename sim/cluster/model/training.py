"""A job's training: the staleness gate, the groups of a step, and the steps, which take what the
planner's cost model says (`services/planner/costs/training_costs.py`), or the pace that a job
declares.

The gate and the choice of groups are those of `common/state/redis/scripts/groups` (`admit`,
`lease_groups`) and `steps/commit_step`, as a mesh runs them in Redis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from meshrl.common.hardware.accelerators import Accelerator
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.emulation import EmulatedTrainingSpeed
from meshrl.common.state.pool.demand.measurements import MeasuredWork
from meshrl.kernels.packing import pack_rounds
from meshrl.services.planner.costs.training_costs import (
    TrainingLayout,
    TrainingWork,
    predict_step_s,
)
from meshrl.sim.cluster.model.event_queue import EventQueue

MICRO_BATCH_COUNT = 64  # micro-batches over which the filling of a pipeline is spread


class TrainingSpeed(Protocol):
    """How fast a job trains."""

    def count_replicas(self, workers: int, is_core: bool) -> int:
        """Copies of the model that so many workers of a resident compute with."""
        ...

    def predict_update_s(self) -> float:
        """Seconds of a step that nobody shares."""
        ...

    def predict_gradient_s(self, trajectory_tokens: Sequence[float]) -> Sequence[float]:
        """Seconds of the gradients of a group's trajectories, of so many tokens each: of every
        piece that one replica computes.
        """
        ...


@dataclass(frozen=True)
class ModelTraining:
    """A core of `layout`; a helper computes with a copy of the model on its own workers."""

    shape: ModelShape
    accelerator: Accelerator
    layout: TrainingLayout

    def count_replicas(self, workers: int, is_core: bool) -> int:
        return self.layout.data_parallel if is_core else 1

    def predict_update_s(self) -> float:
        """Exchange of gradients and update: what a step without tokens takes."""
        return self._empty_s

    def predict_gradient_s(self, trajectory_tokens: Sequence[float]) -> Sequence[float]:
        """A trajectory each, as one of many in its pipeline, with its part of the filling."""
        every = [
            TrainingWork(MICRO_BATCH_COUNT, MICRO_BATCH_COUNT * one, MICRO_BATCH_COUNT * one * one)
            for one in trajectory_tokens
        ]
        taken = [
            predict_step_s(self.shape, self.accelerator, self._replica, work) for work in every
        ]
        return [(one_s - self._idle_s) / MICRO_BATCH_COUNT for one_s in taken]

    @cached_property
    def _empty_s(self) -> float:
        return predict_step_s(
            self.shape,
            self.accelerator,
            self.layout,
            TrainingWork(self.layout.data_parallel, 0.0, 0.0),
        )

    @cached_property
    def _replica(self) -> TrainingLayout:
        return replace(self.layout, data_parallel=1, sharded=False)

    @cached_property
    def _idle_s(self) -> float:
        return predict_step_s(
            self.shape, self.accelerator, self._replica, TrainingWork(1, 0.0, 0.0)
        )


@dataclass(frozen=True, slots=True)
class EmulatedTraining:
    """Of trainers that imitate a pace: a worker computes whole bins, one after the other."""

    emulated_speed: EmulatedTrainingSpeed
    bin_tokens: int

    def count_replicas(self, workers: int, is_core: bool) -> int:
        return workers

    def predict_update_s(self) -> float:
        return self.emulated_speed.update_s

    def predict_gradient_s(self, trajectory_tokens: Sequence[float]) -> Sequence[float]:
        return [
            one / self.emulated_speed.tokens_per_s
            for one in pack_bin_tokens(trajectory_tokens, self.bin_tokens)
        ]


def pack_bin_tokens(tokens: Sequence[float], bin_tokens: int) -> list[float]:
    """Tokens of each bin, as trainers pack them."""
    places = sorted(map(round, tokens), reverse=True)
    return [float(sum(places[i] for i in bin)) for (bin,) in pack_rounds(places, bin_tokens)]


@dataclass(slots=True)
class SimGroup:
    """Trajectories of one prompt."""

    number: int
    prompt_index: int
    opened_version: int  # at which it was opened
    missing_members: int  # members under way
    passed_over: int = 0  # steps that were made of younger groups
    oldest_version: int = 1 << 30  # version of its oldest token
    member_tokens: list[float] = field(default_factory=list)  # of each member that has ended


class SimTraining:
    """The core of a job and its helpers."""

    def __init__(
        self,
        event_queue: EventQueue,
        training_speed: TrainingSpeed,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        steps: int,
        on_commit: Callable[[], None],
        switch_s: float | None = None,
    ) -> None:
        """`committed` is told of each step. With `switch_s` a step begins so long after all of its
        groups are there, as of accelerators that generated them; without, each is computed as it
        comes.
        """
        self.version = 0
        self.step_ends_s: list[float] = []  # when each step was committed
        self.requeued_trajectories = 0  # trajectories that came back too old
        self._event_queue, self._training_speed, self._on_commit = (
            event_queue,
            training_speed,
            on_commit,
        )
        self._groups_per_step, self._group_size = groups_per_step, group_size
        self._max_staleness, self._steps = max_staleness, steps
        self._switch_s = switch_s
        self._admitted_groups = self._next_group = self._next_prompt = 0
        self._requeued_prompts: deque[tuple[int, int]] = (
            deque()
        )  # prompts given back, how often passed over
        self._open_groups: dict[int, SimGroup] = {}
        self._ready_groups: dict[int, SimGroup] = {}
        self._since_s = event_queue.now_s  # when it began to train, or to wait
        self._free_s: dict[
            tuple[str, int], float
        ] = {}  # when each replica has computed what it was given,
        self._computed_s = 0.0  # and all of them,
        self._leased_groups: list[SimGroup] = []  # of the groups of the step so far;
        self._is_step_complete = False  # these are all
        self._step = 0  # that is being made, begun ones counted
        self._waited_s = 0.0  # for them
        self._work = MeasuredWork()

    @property
    def is_finished(self) -> bool:
        return self.version >= self._steps

    @property
    def capacity(self) -> int:
        """Groups that the gate lets through now."""
        steps = min(self._max_staleness + self.version + 1, self._steps)
        return max(0, steps * self._groups_per_step - self._admitted_groups)

    def admit_groups(self, max_groups: int) -> list[SimGroup]:
        """Opens up to so many groups, as many as the gate lets through."""
        found = []
        for _ in range(min(max_groups, self.capacity)):
            if self._requeued_prompts:
                prompt, passed = self._requeued_prompts.popleft()
            else:
                prompt, passed = self._next_prompt, 0
                self._next_prompt += 1
            group = SimGroup(self._next_group, prompt, self.version, self._group_size, passed)
            self._open_groups[group.number] = group
            self._next_group += 1
            self._admitted_groups += 1
            found.append(group)
        return found

    def end_trajectory(self, number: int, oldest_version: int, tokens: float) -> bool:
        """A trajectory has ended, of so many tokens with its prompt; whether its group is whole."""
        group = self._open_groups[number]
        group.missing_members -= 1
        group.oldest_version = min(group.oldest_version, oldest_version)
        group.member_tokens.append(tokens)
        if group.missing_members:
            return False
        self._ready_groups[number] = self._open_groups.pop(number)
        self.lease_groups()
        return True

    def add_replicas(self, instance_id: str, replicas: int) -> None:
        """So many replicas of the model compute gradients from now on."""
        for number in range(replicas):
            self._free_s[instance_id, number] = self._event_queue.now_s
        self.lease_groups()

    def remove_replicas(self, instance_id: str) -> None:
        """Its replicas compute no more. What they have begun they end."""
        for key in [key for key in self._free_s if key[0] == instance_id]:
            del self._free_s[key]

    def restart_step(self) -> None:
        """The core has ended in the middle of a step, whose groups are there for the next one."""
        self._ready_groups.update((group.number, group) for group in self._leased_groups)
        self._leased_groups, self._is_step_complete, self._computed_s = (
            [],
            False,
            self._event_queue.now_s,
        )
        self._step += 1

    def lease_groups(self) -> None:
        """Takes groups of the step that are there, and hands their pieces to who is free first:
        gradients are computed while further groups are waited for.
        """
        if self.is_finished or self._is_step_complete or not self._free_s:
            return
        for group in self._choose_groups():
            del self._ready_groups[group.number]
            self._leased_groups.append(group)
            if self._switch_s is None:
                self._compute_gradient(group, self._event_queue.now_s)
        if len(self._leased_groups) == self._groups_per_step:
            now_s = self._event_queue.now_s
            if self._switch_s is not None:
                for group in self._leased_groups:
                    self._compute_gradient(group, now_s + self._switch_s)
            self._is_step_complete = True
            self._waited_s = now_s - self._since_s
            ends_s = max(now_s, self._computed_s) + self._training_speed.predict_update_s()
            self._event_queue.schedule_at(ends_s, partial(self._commit, self._step))

    def _compute_gradient(self, group: SimGroup, from_s: float) -> None:
        for piece_s in self._training_speed.predict_gradient_s(group.member_tokens):
            first = min(self._free_s, key=lambda one: self._free_s[one])
            self._free_s[first] = max(from_s, self._free_s[first]) + piece_s
            self._computed_s = max(self._computed_s, self._free_s[first])
            self._work += MeasuredWork(work_s=piece_s)
        self._work += MeasuredWork(tokens=sum(group.member_tokens))

    @property
    def work(self) -> MeasuredWork:
        return self._work

    def _choose_groups(self) -> list[SimGroup]:
        """Ready groups that the step takes now, oldest first; what is too old gives its prompt
        back. A place is kept for each open group that may be passed over no more.
        """
        late = sum(group.passed_over >= self._max_staleness for group in self._open_groups.values())
        places = self._groups_per_step - len(self._leased_groups)
        places -= min(late, places)
        chosen: list[SimGroup] = []
        for number in sorted(self._ready_groups):
            if len(chosen) == places:
                break
            group = self._ready_groups[number]
            if self.version - group.oldest_version > self._max_staleness:
                del self._ready_groups[number]
                self._requeued_prompts.append((group.prompt_index, group.passed_over))
                self._admitted_groups -= 1
                self.requeued_trajectories += self._group_size
                continue
            chosen.append(group)
        return chosen

    def _commit(self, step: int) -> None:
        if step != self._step:
            return  # its core has ended meanwhile
        self._step += 1
        now_s = self._event_queue.now_s
        newest = max(group.number for group in self._leased_groups)
        for number, group in self._open_groups.items():
            group.passed_over += number < newest
        busy_s = now_s - self._since_s - self._waited_s
        self._work += MeasuredWork(steps=1.0, busy_s=busy_s, wait_s=self._waited_s)
        self._leased_groups, self._is_step_complete, self._since_s = [], False, now_s
        self.version += 1
        self.step_ends_s.append(now_s)
        self.lease_groups()
        self._on_commit()
