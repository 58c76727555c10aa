"""Training of a job: the staleness gate, the groups of a step, and the time of steps. The time is
that of the planner's cost model (`services/planner/costs/training_costs.py`), or of the job's
emulated speed.

The gate and the choice of groups follow `common/state/redis/scripts/groups` (`admit`,
`lease_groups`) and `steps/commit_step`, which a mesh runs in Redis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

from meshrl.common.hardware.accelerators import Accelerator, predict_gradient_transfer_s
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.emulation import EmulatedTrainingSpeed
from meshrl.common.state.pool.demand.measurements import MeasuredWork
from meshrl.kernels.packing import pack_rounds
from meshrl.services.planner.costs.training_costs import (
    TrainingLayout,
    TrainingWork,
    predict_step_s,
)
from meshrl.sim.cluster.model.engine import SimEngine
from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.workload import SimGroup

ENGINE_SLICE_S = 0.2  # an engine's time slice while the core waits, as in services/engine
QUANTUM_SWITCHES = 2.0  # an instance keeps its ranks for so many switches, as in services/node
MICRO_BATCH_COUNT = 64  # micro-batches that share the filling of a pipeline


class TrainingSpeed(Protocol):
    """Training speed of a job."""

    def count_replicas(self, workers: int, is_core: bool) -> int:
        """Return the number of model replicas on an instance's workers."""
        ...

    def predict_update_s(self) -> float:
        """Predict the seconds of a step's undivided part."""
        ...

    def predict_transfer_s(self) -> float:
        """Predict the seconds in which a hybrid sends its gradient of a step to the core."""
        ...

    def predict_gradient_s(self, trajectory_tokens: Sequence[float]) -> Sequence[float]:
        """Predict the seconds of the gradients of a group's trajectories, given their tokens. Each
        result is a piece that one replica computes.
        """
        ...


@dataclass(frozen=True)
class ModelTraining:
    """Training speed of a core with `layout`; a hybrid has a replica of the model on its own
    workers.
    """

    shape: ModelShape
    accelerator: Accelerator
    layout: TrainingLayout

    def count_replicas(self, workers: int, is_core: bool) -> int:
        return self.layout.data_parallel if is_core else 1

    def predict_update_s(self) -> float:
        """Predict the seconds of a step without tokens: exchange of gradients, and update."""
        return self._empty_s

    def predict_transfer_s(self) -> float:
        """Predict the transfer of a gradient in float32 by the declared network."""
        return predict_gradient_transfer_s(4 * self.shape.parameters, self.accelerator.kind)

    def predict_gradient_s(self, trajectory_tokens: Sequence[float]) -> Sequence[float]:
        """Predict the seconds of each trajectory as one of many in its pipeline, with its part of
        the filling.
        """
        every = [
            TrainingWork(MICRO_BATCH_COUNT, MICRO_BATCH_COUNT * one, MICRO_BATCH_COUNT * one * one)
            for one in trajectory_tokens
        ]
        step_times_s = [
            predict_step_s(self.shape, self.accelerator, self._replica, work) for work in every
        ]
        return [(one_s - self._idle_s) / MICRO_BATCH_COUNT for one_s in step_times_s]

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
    """Emulated training speed: a worker computes whole bins, one after the other."""

    emulated_speed: EmulatedTrainingSpeed
    bin_tokens: int

    def count_replicas(self, workers: int, is_core: bool) -> int:
        return workers

    def predict_update_s(self) -> float:
        return self.emulated_speed.update_s

    def predict_transfer_s(self) -> float:
        """Return 0, as emulated models are small."""
        return 0.0

    def predict_gradient_s(self, trajectory_tokens: Sequence[float]) -> Sequence[float]:
        return [
            one / self.emulated_speed.tokens_per_s
            for one in pack_bin_tokens(trajectory_tokens, self.bin_tokens)
        ]


def pack_bin_tokens(tokens: Sequence[float], bin_tokens: int) -> list[float]:
    """Pack tokens into bins as trainers do; return the tokens of each bin."""
    places = sorted(map(round, tokens), reverse=True)
    return [float(sum(places[i] for i in bin)) for (bin,) in pack_rounds(places, bin_tokens)]


class SimTraining:
    """Core of a job with its hybrids."""

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
        slice_switch_s: float = 0.0,
    ) -> None:
        """Create a training. `on_commit` is called at each step. With `switch_s` engines use the
        core's workers from the start of a step. Its gradients begin this long after
        `release_gradients`, or after all groups are ready. Without `switch_s`, each group is
        computed as it arrives. `slice_switch_s`: seconds of a switch between time slices
        of the core and of an engine on one of its workers (`sliced_engines`).
        """
        # engines that take time slices of the core's workers, by the core's rank
        self.sliced_engines: dict[int, SimEngine] = {}
        self._slice_switch_s, self._core = slice_switch_s, ""
        # by engine: end of the core's last slice there, and its seconds so far
        self._slice_tenures: dict[str, tuple[float, float]] = {}
        self.version = 0
        self.step_ends_s: list[float] = []  # time of each commit
        self.step_tokens: list[float] = []  # tokens trained until then
        self.requeued_trajectories = 0  # stale trajectories
        self._event_queue, self._training_speed, self._on_commit = (
            event_queue,
            training_speed,
            on_commit,
        )
        self._groups_per_step, self._group_size = groups_per_step, group_size
        self._max_staleness, self._steps = max_staleness, steps
        self._switch_s = switch_s
        # engines use the core's workers: gradients of arriving groups wait
        self.holds_gradients = switch_s is not None
        self.held_s = 0.0  # seconds in which they waited, with the switches
        self._held_since_s = event_queue.now_s
        self._held_groups: list[SimGroup] = []
        self._admitted_groups = self._next_group = self._next_prompt = 0
        # requeued prompts, with the number of passes
        self._requeued_prompts: deque[tuple[int, int]] = deque()
        self._open_groups: dict[int, SimGroup] = {}
        self._ready_groups: dict[int, SimGroup] = {}
        self._since_s = event_queue.now_s  # start of its training, or of its wait
        self._free_s: dict[tuple[str, int], float] = {}  # end of each replica's work,
        self._hybrids: set[str] = set()
        self._computed_s = 0.0  # and of all work with its transfers,
        self._leased_groups: list[SimGroup] = []  # on the groups of the step so far;
        self._is_step_complete = False  # no more groups
        self._step = 0  # current step, including restarted ones
        self._waited_s = 0.0  # wait for them
        self._work = MeasuredWork()

    @property
    def replicas(self) -> int:
        return len(self._free_s)

    @property
    def update_s(self) -> float:
        return self._training_speed.predict_update_s()

    @property
    def is_finished(self) -> bool:
        return self.version >= self._steps

    @property
    def capacity(self) -> int:
        """Number of groups that the gate admits now."""
        steps = min(self._max_staleness + self.version + 1, self._steps)
        return max(0, steps * self._groups_per_step - self._admitted_groups)

    def admit_groups(self, max_groups: int) -> list[SimGroup]:
        """Admit up to `max_groups` groups, as far as the gate allows."""
        found = []
        for _ in range(min(max_groups, self.capacity)):
            if self._requeued_prompts:
                prompt, passed_over = self._requeued_prompts.popleft()
            else:
                prompt, passed_over = self._next_prompt, 0
                self._next_prompt += 1
            group = SimGroup(self._next_group, prompt, self.version, self._group_size, passed_over)
            self._open_groups[group.number] = group
            self._next_group += 1
            self._admitted_groups += 1
            found.append(group)
        return found

    def end_trajectory(self, number: int, oldest_version: int, tokens: float) -> bool:
        """End a trajectory of `tokens` tokens with its prompt; return True if its group is
        complete.
        """
        group = self._open_groups[number]
        group.missing_members -= 1
        group.oldest_version = min(group.oldest_version, oldest_version)
        group.member_tokens.append(tokens)
        if group.missing_members:
            return False
        self._ready_groups[number] = self._open_groups.pop(number)
        self.lease_groups()
        return True

    def add_replicas(self, instance_id: str, replicas: int, is_core: bool = True) -> None:
        """Add replicas of the model, which compute gradients from now on."""
        if is_core:
            self._core = instance_id
        else:
            self._hybrids.add(instance_id)
        for number in range(replicas):
            self._free_s[instance_id, number] = self._event_queue.now_s
        self.lease_groups()

    def remove_replicas(self, instance_id: str) -> None:
        """Remove its replicas; they finish the pieces in progress."""
        for key in [key for key in self._free_s if key[0] == instance_id]:
            del self._free_s[key]

    def restart_step(self) -> None:
        """Restart the step of a lost core; its groups are ready for the next one."""
        self._ready_groups.update((group.number, group) for group in self._leased_groups)
        self._leased_groups, self._held_groups = [], []
        self._is_step_complete, self._computed_s = False, self._event_queue.now_s
        self._step += 1

    def lease_groups(self) -> None:
        """Lease ready groups of the step, and give their pieces to the first free replicas.
        Gradients are computed while further groups are awaited.
        """
        if self.is_finished or self._is_step_complete or not self._free_s:
            return
        for group in self._choose_groups():
            del self._ready_groups[group.number]
            self._leased_groups.append(group)
            if self.holds_gradients:
                self._held_groups.append(group)
            else:
                self._compute_gradient(group, self._event_queue.now_s)
        if len(self._leased_groups) == self._groups_per_step:
            now_s = self._event_queue.now_s
            self.release_gradients()
            self._is_step_complete = True
            self._waited_s = now_s - self._since_s
            update_s = self._training_speed.predict_update_s()
            starts_s = max(now_s, self._computed_s)
            for engine in self.sliced_engines.values():
                self._block_engine(engine, starts_s, update_s)
            ends_s = starts_s + update_s
            self._event_queue.schedule_at(ends_s, partial(self._commit, self._step))

    def hold_gradients(self) -> float:
        """Let engines use the core's workers after the present pieces; return the time of that."""
        if not self.holds_gradients:
            self._held_since_s = max([self._event_queue.now_s, *self._free_s.values()])
            self.holds_gradients = True
        return self._held_since_s

    def release_gradients(self, has_switch: bool = True) -> None:
        """Compute the gradients of the groups so far, after the switch to training."""
        if not self.holds_gradients:
            return
        self.holds_gradients = False
        from_s = max(self._event_queue.now_s, self._held_since_s)
        from_s += (self._switch_s or 0.0) * has_switch
        self.held_s += from_s - self._held_since_s
        held, self._held_groups = self._held_groups, []
        for group in held:
            self._compute_gradient(group, from_s)

    def _compute_gradient(self, group: SimGroup, from_s: float) -> None:
        tokens = sum(group.member_tokens)
        pieces_s = list(self._training_speed.predict_gradient_s(group.member_tokens))
        for piece_s in pieces_s:
            first = min(self._free_s, key=lambda one: self._free_s[one] + self._transfer_s(one))
            starts_s = max(from_s, self._free_s[first])
            engine = self.sliced_engines.get(first[1]) if first[0] == self._core else None
            if engine is not None:
                starts_s = self._take_slice(engine, starts_s, piece_s)
            self._free_s[first] = starts_s + piece_s
            arrives_s = self._free_s[first] + self._transfer_s(first)
            self._computed_s = max(self._computed_s, arrives_s)
            work = MeasuredWork(work_s=piece_s, tokens=tokens / len(pieces_s))
            self._event_queue.schedule_at(self._free_s[first], partial(self._record_work, work))

    def _record_work(self, work: MeasuredWork) -> None:
        """Record a piece at its end: pieces that wait for their replica are no work of a step."""
        self._work += work

    def _take_slice(self, engine: SimEngine, from_s: float, piece_s: float) -> float:
        """Give the core a time slice for a piece on an engine's worker; return its start. The core
        keeps the worker for pieces that follow at once, up to its quantum.
        """
        end_s, used_s = self._slice_tenures.get(engine.name, (-1.0, 0.0))
        if from_s == end_s and used_s < QUANTUM_SWITCHES * self._slice_switch_s:
            self._slice_tenures[engine.name] = from_s + piece_s, used_s + piece_s
            self._block_engine(engine, from_s, piece_s)
            return from_s
        starts_s = from_s + self._slice_switch_s + (ENGINE_SLICE_S if engine.running else 0.0)
        self._slice_tenures[engine.name] = starts_s + piece_s, piece_s
        self._block_engine(engine, starts_s, piece_s + self._slice_switch_s)
        return starts_s

    def _block_engine(self, engine: SimEngine, from_s: float, seconds: float) -> None:
        """Let an engine wait for a time slice of the core that shares its worker."""
        self._event_queue.schedule_at(from_s, partial(engine.block, seconds))

    def _transfer_s(self, replica: tuple[str, int]) -> float:
        """Return the seconds from the end of a replica's work until the core has its gradient."""
        is_hybrid = replica[0] in self._hybrids
        return self._training_speed.predict_transfer_s() if is_hybrid else 0.0

    @property
    def work(self) -> MeasuredWork:
        return self._work

    def _choose_groups(self) -> list[SimGroup]:
        """Choose ready groups for the step, oldest first; requeue the prompts of stale ones.
        Reserve a place for each open group that must not be passed over again.
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
            return  # its core has been lost
        self._step += 1
        now_s = self._event_queue.now_s
        newest = max(group.number for group in self._leased_groups)
        for number, group in self._open_groups.items():
            group.passed_over += number < newest
        busy_s = now_s - self._since_s - self._waited_s
        self._work += MeasuredWork(steps=1.0, busy_s=busy_s, wait_s=self._waited_s)
        self._leased_groups, self._is_step_complete, self._since_s = [], False, now_s
        self.holds_gradients, self._held_since_s = self._switch_s is not None, now_s
        self.version += 1
        self.step_tokens.append(self._work.tokens)
        self.step_ends_s.append(now_s)
        self.lease_groups()
        self._on_commit()
