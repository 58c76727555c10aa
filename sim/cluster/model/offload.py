"""Seeding of a simulated job: engines on its core's workers generate at the start of each step.
Then engines elsewhere continue their trajectories (`services/planner/policies/offload.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from meshrl.common.job.constraints import ConfigTable, NonNegativeNumber, PositiveNumber
from meshrl.services.planner.balance.seeding import SeedingState, bound_remote
from meshrl.services.planner.policies.offload import (
    EnginePrices,
    OffloadState,
    StepFigures,
    set_remote,
    update_offload,
)
from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.training import SimTraining


@dataclass(frozen=True)
class OffloadTable(ConfigTable):
    """`[jobs.offload]`: strictly on-policy rollout on workers that may vanish."""

    use: bool = False
    # seed: by Algorithm 1; never: only without engines elsewhere
    seeding: Literal["adaptive", "never"] = "adaptive"
    remembers: bool = True  # seeding times by number of engines
    sees_prices: bool = True  # buys no engine that does not pay
    limited: bool = True  # takes no more engines than pay
    first_scale: PositiveNumber = 1.0  # factor of the first computed seeding time
    recompute: bool = False  # trajectories of lost engines start again from their prompt
    barrier: bool = False  # engines get weights together, and only between two steps
    switch_s: NonNegativeNumber = 1.0  # between an engine and the core on the core's workers
    weights_s: NonNegativeNumber = 0.0  # from an update until its weights can be sent
    # bytes a second of the network of an engine's host, and of the core's
    receive_bytes_per_s: PositiveNumber = 6.25e9
    send_bytes_per_s: PositiveNumber = 25e9


@dataclass(frozen=True, slots=True)
class WindowActions:
    """Actions of the job on its engines."""

    open_engines: Callable[[], None]  # those on the core's workers accept requests
    close_engines: Callable[[], None]  # and hand them over
    count_ready: Callable[[], int]  # engines elsewhere with the newest weights
    count_running: Callable[[], int]  # trajectories in progress


class SeedingWindow:
    """Time in which the engines on a core's workers generate, step by step."""

    def __init__(
        self,
        event_queue: EventQueue,
        table: OffloadTable,
        training: SimTraining,
        actions: WindowActions,
    ) -> None:
        self.state = OffloadState()
        self.limits = SeedingState()  # for the planner: workers that pay
        self.prices = EnginePrices()
        self.history: list[tuple[float, float, int]] = []  # (time, seconds, workers) of each step
        self.remote = 0  # workers of engines elsewhere
        self.last_end_s = 0.0  # of a trajectory
        self._event_queue, self._table, self._training = event_queue, table, training
        self._actions = actions
        self._began_s = self._changed_s = 0.0  # of the step, and of the number of workers
        self._remote_s = 0.0  # of workers elsewhere in this step
        self._before = (0.0, 0.0)  # work and held seconds before this step
        self._opening = 0  # number of the opening

    def begin(self) -> None:
        """Begin the first step."""
        self._began_s = self._changed_s = self._event_queue.now_s
        self._open()

    def end_step(self, core_workers: int) -> None:
        """Update the seeding time after a step, and begin the next one."""
        self._count_worker_seconds()
        training, now_s = self._training, self._event_queue.now_s
        step_s = now_s - self._began_s
        work_s, held_s = training.work.work_s, training.held_s
        training_s = (work_s - self._before[0]) / max(1, training.replicas) + training.update_s
        idle_s = step_s - (held_s - self._before[1]) - training_s
        figures = StepFigures(
            trainer_idle_s=max(0.0, idle_s),
            remote_idle_s=now_s - self.last_end_s,
            training_s=training_s,
            step_s=step_s,
            seeding=core_workers,
            remote=self._remote_s / step_s,
        )
        was = self.state.seed_s
        self.state = update_offload(
            self.state, figures, self.remote, self.prices, remembers=self._table.remembers
        )
        if was is None and self.state.seed_s is not None:
            self.state = _scale(self.state, self._table.first_scale)
        if self._table.limited:
            self.limits = bound_remote(self.limits, self.state)
        self.history.append((now_s, self.state.seed_s or 0.0, self.remote))
        self._began_s, self._remote_s, self._before = now_s, 0.0, (work_s, held_s)
        self._open()

    def set_remote(self, remote: int) -> None:
        """Set the number of workers elsewhere; open the window if the last one has gone."""
        if remote == self.remote:
            return
        self._count_worker_seconds()
        self.remote = remote
        if self._table.remembers:
            self.state = set_remote(self.state, remote)
        if self._training.holds_gradients:
            self._schedule_close()
        elif not remote and self._actions.count_running():
            free_s = self._training.hold_gradients() + self._table.switch_s
            self._opening += 1
            opening = self._opening
            self._event_queue.schedule_at(free_s, lambda: self._reopen(opening))

    def on_engine_ready(self) -> None:
        """Close the window if its time is over."""
        if self._training.holds_gradients:
            self._schedule_close()

    def _count_worker_seconds(self) -> None:
        now_s = self._event_queue.now_s
        self._remote_s += (now_s - self._changed_s) * self.remote
        self._changed_s = now_s

    def _open(self) -> None:
        self._opening += 1
        self._actions.open_engines()
        if self._table.seeding == "never" and self.remote:
            self._close()
        else:
            self._schedule_close()

    def _reopen(self, opening: int) -> None:
        if opening == self._opening and self._training.holds_gradients:
            self._actions.open_engines()

    def _schedule_close(self) -> None:
        seed_s = 0.0 if self._table.seeding == "never" else self.state.seed_s
        if seed_s is not None:
            at_s = self._began_s + seed_s
            self._event_queue.schedule_at(at_s, partial(self._try_close, self._opening))

    def _try_close(self, opening: int) -> None:
        """Close the window, if its time is over and an engine elsewhere can go on."""
        if opening != self._opening or not self._training.holds_gradients:
            return
        seed_s = 0.0 if self._table.seeding == "never" else self.state.seed_s
        is_over = seed_s is not None and self._event_queue.now_s >= self._began_s + seed_s - 1e-6
        if is_over and self._actions.count_ready():
            self._close()

    def _close(self) -> None:
        has_seeded = self._event_queue.now_s > self._began_s
        self._training.release_gradients(has_switch=has_seeded)
        self._actions.close_engines()


def _scale(state: OffloadState, factor: float) -> OffloadState:
    """Return a state with seeding times that are `factor` times as long."""
    assert state.seed_s is not None
    known: Mapping[str, float] = {n: factor * s for n, s in state.known_seed_s.items()}
    return replace(state, seed_s=factor * state.seed_s, known_seed_s=known)
