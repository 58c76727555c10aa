"""Job of a simulated cluster: its shards, its training, and its measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean as mean

from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measurements import Measurements, merge_lengths
from meshrl.common.state.pool.demand.requirements import JobRequirements, PlannedJob
from meshrl.common.state.pool.workers.rows import Instance, Role
from meshrl.sim.cluster.model.engine import SimEngine
from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.offload import OffloadTable, SeedingWindow, WindowActions
from meshrl.sim.cluster.model.shard import SimShard, SimTrajectory
from meshrl.sim.cluster.model.speeds import SimSpeed
from meshrl.sim.cluster.model.training import SimTraining, TrainingSpeed
from meshrl.sim.cluster.model.workload import SimWorkload

MAX_TRAJECTORY_TOKENS = 1 << 20  # default limit of tokens of a trajectory
MAX_ENGINES_PER_SHARD = 64  # maximum of a shard


@dataclass(frozen=True)
class JobSpec:
    """Requirements, workload and speeds of a job."""

    workload: SimWorkload
    training_speed: TrainingSpeed
    get_engine_speed: Callable[
        [str, int], SimSpeed
    ]  # of engines on accelerators of a kind, by degree
    name: str = "job"
    steps: int = 48
    groups_per_step: int = 4
    group_size: int = 6
    max_staleness: int = 2
    slots: int = 64
    bin_tokens: int = 0
    requirements: JobRequirements = field(default_factory=JobRequirements)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    emulated_engine: str = ""
    emulated_training: str = ""
    shape: ModelShape | None = None
    max_trajectory_tokens: int = MAX_TRAJECTORY_TOKENS  # tokens of a trajectory
    has_length_buckets: bool = False  # C-MLFQ: degrees of engines serve ranges of lengths
    pull_s: float = 0.0  # pause of an engine for new weights
    # seconds until an engine of a degree, on accelerators of a kind, has those of a step
    get_arrival_s: Callable[[str, int], float] = lambda kind, degree: 0.0
    initial_tensor_parallel_sizes: tuple[int, ...] = ()  # degrees of initial engines
    # Colocated: all accelerators roll out, then all train, with this pause; None: not colocated.
    switch_s: float | None = None
    offload: OffloadTable = field(default_factory=OffloadTable)
    slice_switch_s: float = 0.0  # seconds of a switch between time slices of an engine and the core


class SimJob:
    """Job in progress."""

    def __init__(self, event_queue: EventQueue, spec: JobSpec) -> None:
        self.spec = spec
        self.shards: list[SimShard] = []
        self.training = SimTraining(
            event_queue,
            spec.training_speed,
            spec.groups_per_step,
            spec.group_size,
            spec.max_staleness,
            spec.steps,
            self._on_commit,
            spec.offload.switch_s if spec.offload.use else spec.switch_s,
            spec.slice_switch_s,
        )
        self._seeding_engines: dict[str, SimEngine] = {}  # on the core's workers
        self.window = SeedingWindow(
            event_queue,
            spec.offload,
            self.training,
            WindowActions(
                self._open_engines,
                self._close_engines,
                lambda: sum(e.version >= self.training.version for e in self._remote_engines),
                lambda: sum(len(shard.trajectories) for shard in self.shards),
            ),
        )
        self._left_engines: set[str] = set()  # whose end is announced
        self._sender_free_s = 0.0  # end of the transfers of weights so far
        self.training_started_s: float | None = None  # start of its training
        self.worker_shares: list[
            tuple[float, int, int]
        ] = []  # (since, workers of engines, other workers)
        self._event_queue = event_queue
        self._core, self._is_fill_scheduled = "", False
        self._engine_workers: dict[str, int] = {}  # workers of each engine,
        self._training_workers: dict[str, int] = {}  # and of each training instance
        self._shard_of_engine: dict[str, SimShard] = {}  # by engine

    # -- instances ---------------------------------------------------------------------------------

    def add_instance(self, instance: Instance, kind: str) -> None:
        if instance.role == Role.ROLLOUT:
            degree, spec = len(instance.ranks), self.spec
            speed = spec.get_engine_speed(kind, degree)
            engine = SimEngine(instance.id, self._event_queue, speed, spec.slots, degree)
            engine.version, engine.kind = self.training.version, kind
            shard = self._shard_of_engine[instance.id] = self._choose_shard()
            self._engine_workers[instance.id] = degree
            if instance.time_sliced and spec.offload.use:
                self._seeding_engines[instance.id] = engine
                engine.version = engine.version if self.training.holds_gradients else -1
            elif spec.offload.use and self.training.version:
                engine.version = -1
            elif instance.time_sliced:
                self.training.sliced_engines[instance.ranks[0]] = engine
            shard.add_engine(engine)
            self._count_remote()
            is_remote = instance.id not in self._seeding_engines
            if engine.version < 0 and is_remote and not spec.offload.barrier:
                self._pull_weights(shard, engine)
        else:
            if self.training_started_s is None and instance.core:
                self.training_started_s = self._event_queue.now_s
            self._training_workers[instance.id] = len(instance.ranks)
            if instance.core:
                self._core = instance.id
            replicas = self.spec.training_speed.count_replicas(len(instance.ranks), instance.core)
            self.training.add_replicas(instance.id, replicas, instance.core)
            if instance.core and self.spec.offload.use and not self.training.version:
                self.window.begin()
        self._record_shares()
        if not self._is_fill_scheduled:  # after all events of this time
            self._is_fill_scheduled = True
            self._event_queue.schedule_after(0.0, self._fill_when_ready)

    def _fill_when_ready(self) -> None:
        self._is_fill_scheduled = False
        self.open_groups()

    def fail_instance(self, instance_id: str) -> None:
        """Fail an instance with its host; a core's step starts again with the next core."""
        if instance_id == self._core:
            self.training.restart_step()
        self.remove_instance(instance_id)

    def remove_instance(self, instance_id: str) -> None:
        if shard := self._shard_of_engine.pop(instance_id, None):
            shard.remove_engine(instance_id, self.spec.offload.recompute)
            del self._engine_workers[instance_id]
            self._seeding_engines.pop(instance_id, None)
            self._count_remote()
            sliced = self.training.sliced_engines
            for rank in [rank for rank, one in sliced.items() if one.name == instance_id]:
                del sliced[rank]
        self.training.remove_replicas(instance_id)
        self._training_workers.pop(instance_id, None)
        self._record_shares()

    def leave_engine(self, instance_id: str) -> None:
        """Let the trajectories of an engine whose end is announced continue elsewhere."""
        shard = self._shard_of_engine.get(instance_id)
        if shard is not None and len(shard.engines) > 1:
            self._left_engines.add(instance_id)
            shard.engines[instance_id].engine.version = -1
            shard.hand_over([instance_id])

    @property
    def engines(self) -> list[SimEngine]:
        return [place.engine for shard in self.shards for place in shard.engines.values()]

    @property
    def _remote_engines(self) -> list[SimEngine]:
        return [one for one in self.engines if one.name not in self._seeding_engines]

    @property
    def sampled_tokens(self) -> float:
        return sum(shard.sampled_tokens for shard in self.shards)

    def _count_remote(self) -> None:
        self.window.set_remote(sum(one.tensor_parallel_size for one in self._remote_engines))

    def _choose_shard(self) -> SimShard:
        """Choose the shard of a new engine: a new shard when all are full."""
        smallest = min(self.shards, key=lambda one: len(one.engines), default=None)
        if smallest is None or len(smallest.engines) >= MAX_ENGINES_PER_SHARD:
            spec = self.spec
            smallest = SimShard(
                self._event_queue,
                self._on_trajectory_end,
                spec.slots,
                spec.max_trajectory_tokens,
                spec.has_length_buckets,
            )
            self.shards.append(smallest)
        return smallest

    def _record_shares(self) -> None:
        rolls, trains = sum(self._engine_workers.values()), sum(self._training_workers.values())
        self.worker_shares.append((self._event_queue.now_s, rolls, trains))

    # -- progress ----------------------------------------------------------------------------------

    def open_groups(self) -> None:
        """Open groups within capacity and the gate, evenly over shards."""
        each = -(-self.training.capacity // max(1, len(self.shards)))
        for shard in self.shards:
            self._fill_shard(shard, each)

    def _fill_shard(self, shard: SimShard, max_groups: int) -> None:
        if self.training_started_s is None or not shard.engines:
            return
        spec, size = self.spec, self.spec.group_size
        while max_groups > 0 and self.training.capacity and (room := shard.free_capacity) > -size:
            opened = self.training.admit_groups(min(max_groups, -(-(room + size) // size)))
            max_groups -= len(opened)
            share = self.training.version / max(1, spec.steps - 1)
            for group in opened:
                for member in range(size):
                    script = spec.workload.draw_script(group.number, member, share)
                    shard.start_trajectory(
                        group.number, group.prompt_index, group.opened_version, script
                    )

    def _on_trajectory_end(self, shard: SimShard, trajectory: SimTrajectory) -> None:
        completed_groups = self.training.end_trajectory(
            trajectory.group, trajectory.oldest_version, trajectory.context_tokens
        )
        shard.work_counter.groups += completed_groups
        self.window.last_end_s = self._event_queue.now_s
        self._fill_shard(shard, self.training.capacity)

    def _on_commit(self) -> None:
        version = self.training.version
        if self.spec.offload.use:
            return self._begin_offloaded_step()
        for shard in self.shards:
            for place in shard.engines.values():
                engine = place.engine
                if arrives_s := self.spec.get_arrival_s(engine.kind, engine.tensor_parallel_size):
                    self._event_queue.schedule_after(
                        arrives_s, partial(self._on_weights_arrival, shard, engine, version)
                    )
                else:
                    self._load_version(engine, version)
            shard.dispatch()
        self.open_groups()

    def _begin_offloaded_step(self) -> None:
        """Send the new weights to engines elsewhere, and open those on the core's workers."""
        self._sender_free_s = self._event_queue.now_s + self.spec.offload.weights_s
        pulls = [
            (shard, place.engine)
            for shard in self.shards
            for place in shard.engines.values()
            if place.engine.name not in self._seeding_engines
        ]
        ends_s = [self._pull_weights(shard, engine) for shard, engine in pulls]
        begin = partial(self.window.end_step, self._training_workers[self._core])
        if self.spec.offload.barrier and ends_s:
            self._event_queue.schedule_at(max(ends_s), begin)
        else:
            begin()
        for shard in self.shards:
            shard.dispatch()
        self.open_groups()

    def _pull_weights(self, shard: SimShard, engine: SimEngine) -> float:
        """Let an engine pull the newest weights; return the time at which it has them."""
        table, now_s, version = self.spec.offload, self._event_queue.now_s, self.training.version
        size = self.spec.shape.parameter_bytes if self.spec.shape is not None else 0.0
        starts_s = max(now_s, self._sender_free_s)
        self._sender_free_s = starts_s + size / table.send_bytes_per_s
        arrives_s = max(self._sender_free_s, now_s + size / table.receive_bytes_per_s)
        self._event_queue.schedule_at(
            arrives_s, partial(self._on_weights_arrival, shard, engine, version)
        )
        return arrives_s

    def _open_engines(self) -> None:
        for shard in self.shards:
            for engine in self._seeding_engines.values():
                if engine.name in shard.engines:
                    engine.version = self.training.version
            shard.dispatch()
        self.open_groups()

    def _close_engines(self) -> None:
        for shard in self.shards:
            for engine in self._seeding_engines.values():
                engine.version = -1
            shard.hand_over([name for name in self._seeding_engines if name in shard.engines])

    def _on_weights_arrival(self, shard: SimShard, engine: SimEngine, version: int) -> None:
        if engine.name in shard.engines and version > engine.version:
            if self.spec.offload.use and version < self.training.version:
                return  # a newer one is on its way
            if engine.name in self._left_engines:
                return
            self._load_version(engine, version)
            shard.dispatch()
            self.open_groups()
            self.window.on_engine_ready()

    def _load_version(self, engine: SimEngine, version: int) -> None:
        engine.version = version
        if self.spec.pull_s:
            engine.block(self.spec.pull_s)

    # -- measurements ------------------------------------------------------------------------------

    @property
    def planned_job(self) -> PlannedJob:
        spec, training = self.spec, self.training
        return PlannedJob(
            spec.name,
            Phase.TRAINING,
            spec.requirements,
            spec.planner,
            spec.groups_per_step,
            spec.group_size,
            spec.max_staleness,
            spec.slots,
            spec.bin_tokens,
            spec.steps,
            training.requeued_trajectories,
            steps_done=training.version,
            measurements=self._collect_measurements(),
            emulated_engine=spec.emulated_engine,
            emulated_training=spec.emulated_training,
            model_key=spec.name,
            model_shape=spec.shape,
            gradient_transfer_s=spec.training_speed.predict_transfer_s(),
            slice_switch_s=spec.slice_switch_s,
        )

    def _collect_measurements(self) -> Measurements:
        engines_by_speed: dict[int, list[SimEngine]] = {}
        for engine in self.engines:
            engines_by_speed.setdefault(id(engine.speed), []).append(engine)
        curves = tuple(
            engines[0].speed.make_curve(round(mean(one.steps for one in engines)))
            for engines in engines_by_speed.values()
        )
        work = {f"shard-{n}": shard.work for n, shard in enumerate(self.shards)}
        lengths = [
            one for shard in self.shards if (one := shard.work_counter.length_summary) is not None
        ]
        return Measurements(work | {"core": self.training.work}, curves, merge_lengths(lengths))
