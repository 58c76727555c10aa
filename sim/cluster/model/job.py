"""A job of a simulated cluster: its shard, its training, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean as mean

from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measured import Measured, together
from meshrl.common.state.pool.demand.needs import Need, PlannedJob
from meshrl.common.state.pool.workers.rows import Resident, Role
from meshrl.sim.cluster.model.agenda import Agenda
from meshrl.sim.cluster.model.engine import SimEngine
from meshrl.sim.cluster.model.shard import Shard, SimTrajectory
from meshrl.sim.cluster.model.speeds import SimSpeed
from meshrl.sim.cluster.model.training import SimTraining, TrainingSpeed
from meshrl.sim.cluster.model.workload import SimWorkload

LONGEST = 1 << 20  # tokens of a trajectory, where nothing is said
ENGINES = 64  # of a shard at most


@dataclass(frozen=True)
class JobSpec:
    """What a job asks for, what it does, and how fast that goes."""

    workload: SimWorkload
    trains: TrainingSpeed
    speed: Callable[[str, int], SimSpeed]  # of engines on accelerators of a kind, by degree
    name: str = "job"
    steps: int = 48
    groups_per_step: int = 4
    group_size: int = 6
    max_staleness: int = 2
    slots: int = 64
    bin_tokens: int = 0
    need: Need = field(default_factory=Need)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    pace: str = ""
    training_pace: str = ""
    shape: ModelShape | None = None
    longest: int = LONGEST  # tokens of a trajectory
    buckets: bool = False  # C-MLFQ: engines are for lengths by their degrees
    pull_s: float = 0.0  # that an engine stands for other weights
    # seconds until an engine of a degree, on accelerators of a kind, has those of a step
    arrives_s: Callable[[str, int], float] = lambda kind, degree: 0.0
    engines: tuple[int, ...] = ()  # degrees of those that are placed at the beginning
    # All accelerators roll out, then all train, with so long in between; None: others do.
    switch_s: float | None = None


class SimJob:
    """One job while it runs."""

    def __init__(self, agenda: Agenda, spec: JobSpec) -> None:
        self.spec = spec
        self.shards: list[Shard] = []
        self.training = SimTraining(
            agenda,
            spec.trains,
            spec.groups_per_step,
            spec.group_size,
            spec.max_staleness,
            spec.steps,
            self._committed,
            spec.switch_s,
        )
        self.began_s: float | None = None  # when its training began
        self.shares: list[tuple[float, int, int]] = []  # since when: workers of engines, and others
        self._agenda = agenda
        self._core, self._due = "", False
        self._rolls: dict[str, int] = {}  # workers of each engine,
        self._workers: dict[str, int] = {}  # and of each resident that trains
        self._of: dict[str, Shard] = {}  # each engine

    # -- residents ---------------------------------------------------------------------------------

    def ready(self, resident: Resident, kind: str) -> None:
        if resident.role == Role.ROLLOUT:
            degree, spec = len(resident.ranks), self.spec
            speed = spec.speed(kind, degree)
            engine = SimEngine(resident.id, self._agenda, speed, spec.slots, degree)
            engine.version, engine.kind = self.training.version, kind
            shard = self._of[resident.id] = self._smallest()
            self._rolls[resident.id] = degree
            shard.join(engine)
        else:
            if self.began_s is None and resident.core:
                self.began_s = self._agenda.now_s
            self._workers[resident.id] = len(resident.ranks)
            if resident.core:
                self._core = resident.id
            replicas = self.spec.trains.replicas(len(resident.ranks), resident.core)
            self.training.attend(resident.id, replicas)
        self._told()
        if not self._due:  # all that come at this time are there by then
            self._due = True
            self._agenda.after(0.0, self._begun)

    def _begun(self) -> None:
        self._due = False
        self.fill()

    def failed(self, resident: str) -> None:
        """A resident has ended with its host; a core's step is begun anew when there is one."""
        if resident == self._core:
            self.training.lose()
        self.gone(resident)

    def gone(self, resident: str) -> None:
        if shard := self._of.pop(resident, None):
            shard.leave(resident)
            del self._rolls[resident]
        self.training.dismiss(resident)
        self._workers.pop(resident, None)
        self._told()

    @property
    def engines(self) -> list[SimEngine]:
        return [place.engine for shard in self.shards for place in shard.places.values()]

    @property
    def sampled(self) -> float:
        return sum(shard.sampled for shard in self.shards)

    def _smallest(self) -> Shard:
        """The shard of an engine that comes: a new one when all have as many as they may."""
        smallest = min(self.shards, key=lambda one: len(one.places), default=None)
        if smallest is None or len(smallest.places) >= ENGINES:
            spec = self.spec
            smallest = Shard(self._agenda, self._ended, spec.slots, spec.longest, spec.buckets)
            self.shards.append(smallest)
        return smallest

    def _told(self) -> None:
        rolls, trains = sum(self._rolls.values()), sum(self._workers.values())
        self.shares.append((self._agenda.now_s, rolls, trains))

    # -- its course --------------------------------------------------------------------------------

    def fill(self) -> None:
        """Opens groups as far as there is room, and the gate lets them through, as many at each
        shard.
        """
        each = -(-self.training.capacity // max(1, len(self.shards)))
        for shard in self.shards:
            self._fill(shard, each)

    def _fill(self, shard: Shard, most: int) -> None:
        if self.began_s is None or not shard.places:
            return
        spec, size = self.spec, self.spec.group_size
        while most > 0 and self.training.capacity and (room := shard.room) > -size:
            opened = self.training.admit(min(most, -(-(room + size) // size)))
            most -= len(opened)
            share = self.training.version / max(1, spec.steps - 1)
            for group in opened:
                for member in range(size):
                    script = spec.workload.script(group.number, member, share)
                    shard.open(group.number, group.prompt, group.version, script)

    def _ended(self, shard: Shard, t: SimTrajectory) -> None:
        whole = self.training.ended(t.group, t.oldest, t.context)
        shard.worked.groups += whole
        self._fill(shard, self.training.capacity)

    def _committed(self) -> None:
        version = self.training.version
        for shard in self.shards:
            for place in shard.places.values():
                engine = place.engine
                if arrives_s := self.spec.arrives_s(engine.kind, engine.degree):
                    self._agenda.after(arrives_s, partial(self._arrived, shard, engine, version))
                else:
                    self._take(engine, version)
            shard.dispatch()
        self.fill()

    def _arrived(self, shard: Shard, engine: SimEngine, version: int) -> None:
        if engine.name in shard.places and version > engine.version:
            self._take(engine, version)
            shard.dispatch()
            self.fill()

    def _take(self, engine: SimEngine, version: int) -> None:
        engine.version = version
        if self.spec.pull_s:
            engine.stand(self.spec.pull_s)

    # -- what it says ------------------------------------------------------------------------------

    @property
    def planned(self) -> PlannedJob:
        spec, training = self.spec, self.training
        return PlannedJob(
            spec.name,
            Phase.TRAINING,
            spec.need,
            spec.planner,
            spec.groups_per_step,
            spec.group_size,
            spec.max_staleness,
            spec.slots,
            spec.bin_tokens,
            spec.steps,
            training.requeued,
            steps_done=training.version,
            measured=self._measured(),
            pace=spec.pace,
            training_pace=spec.training_pace,
            model=spec.name,
            shape=spec.shape,
        )

    def _measured(self) -> Measured:
        alike: dict[int, list[SimEngine]] = {}
        for engine in self.engines:
            alike.setdefault(id(engine.speed), []).append(engine)
        curves = tuple(
            same[0].speed.curve(round(mean(one.steps for one in same))) for same in alike.values()
        )
        work = {f"shard-{n}": shard.work for n, shard in enumerate(self.shards)}
        lengths = [one for shard in self.shards if (one := shard.worked.lengths) is not None]
        return Measured(work | {"core": self.training.work}, curves, together(lengths))
