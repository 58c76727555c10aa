"""Shard of a job: it assigns each turn to an engine by the router's own policies.

The policies are those of `services/rollout/routing`. The shard also measures the time of its
trajectories by state.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshrl.common.base.occupancy import Occupancy
from meshrl.common.state.pool.demand.measurements import MeasuredWork
from meshrl.services.rollout.routing import load_balancer, queue_policy
from meshrl.services.rollout.routing.assignment import AT_ENGINE, TURN
from meshrl.services.rollout.routing.cmlfq import BucketScheduler
from meshrl.services.rollout.routing.degree_buckets import MeasuredEngine as Rated
from meshrl.services.rollout.routing.length_trees import LengthTrees, PastTrajectory, ToolReturn
from meshrl.services.rollout.routing.queue_policy import EngineLoad, LengthBucket, QueuedRequest
from meshrl.services.rollout.work_counters import IN_FLIGHT, ShardWorkCounters
from meshrl.sim.cluster.model.engine import SimEngine, SimRequest
from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.workload import TrajectoryScript

LOOKAHEAD_REQUESTS = 64  # as in the router


@dataclass(eq=False, slots=True)
class SimTrajectory:
    """Trajectory in progress."""

    group: int
    prompt: int  # the row of the data set
    min_version: int  # older weights must not serve it
    script: TrajectoryScript
    turn_index: int = 0
    remaining_tokens: float = 0.0  # tokens of the turn
    context_tokens: float = 0.0
    sampled_tokens: float = 0.0
    oldest_version: int = -1  # version of its first token
    cache_engine: str = ""  # the engine with its cache
    assigned_engine: str = ""  # the engine with its slot
    request: SimRequest | None = None
    bucket: int = 0
    # with the tokens sampled before each
    tool_returns: list[tuple[ToolReturn, int]] = field(default_factory=list)
    queue_order: tuple[int, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class ShardEngine:
    """Engine with its load from this shard."""

    engine: SimEngine
    bucket: int = 0
    # turns in progress, oldest first
    running_trajectories: dict[SimTrajectory, None] = field(default_factory=dict)
    assigned_count: int = 0  # trajectories with a slot there
    _load: EngineLoad = field(init=False, repr=False, default=EngineLoad("", 1, 0, -1))

    @property
    def load(self) -> EngineLoad:
        engine, load, out = self.engine, self._load, len(self.running_trajectories)
        now = (load.running, load.used_slots, load.version, load.bucket)
        if now != (out, self.assigned_count, engine.version, self.bucket) or not load.name:
            name, slots = engine.name, engine.slots
            self._load = EngineLoad(
                name, slots, out, engine.version, self.bucket, slots, self.assigned_count
            )
        return self._load


class SimShard:
    """Engines of a shard, and their trajectories."""

    def __init__(
        self,
        event_queue: EventQueue,
        on_end: Callable[[SimShard, SimTrajectory], None],
        slots: int,
        max_tokens: int,
        has_length_buckets: bool,
    ) -> None:
        """Create a shard. `on_end` is called with each finished trajectory. With
        `has_length_buckets` engines form buckets by degree, for trajectories of up to
        `max_tokens` tokens.
        """
        buckets = [LengthBucket(max_tokens, slots)]
        self._scheduler = BucketScheduler(
            buckets, LengthTrees(), follows_engines=has_length_buckets
        )
        self._has_length_buckets = has_length_buckets
        self.engines: dict[str, ShardEngine] = {}
        self.work_counter = ShardWorkCounters(Occupancy(lambda: event_queue.now_s))
        self.sampled_tokens = 0.0  # tokens
        self.trajectories: set[SimTrajectory] = set()
        self._event_queue, self._on_end = event_queue, on_end
        self._queue: list[SimTrajectory] = []
        self._arrival_count = 0

    # -- engines -----------------------------------------------------------------------------------

    def add_engine(self, engine: SimEngine) -> None:
        self.engines[engine.name] = ShardEngine(engine)
        self._update_buckets()
        self.dispatch()

    def remove_engine(self, name: str, recompute: bool = False) -> None:
        """Remove an engine; its trajectories continue elsewhere with their tokens so far. With
        `recompute` they start again.
        """
        place = self.engines.pop(name)
        place.engine.release_all()
        self._update_buckets()
        for t in list(self.trajectories):
            if t.assigned_engine == name:
                t.assigned_engine = ""
        for t in list(place.running_trajectories):
            self._interrupt_turn(t)
            self._add_state_count(AT_ENGINE, -1)
            if recompute:
                t.turn_index, t.sampled_tokens, t.cache_engine = 0, 0.0, ""
                t.context_tokens = t.script.prompt_tokens
                t.remaining_tokens = t.script.turns[0].tokens
            self._route(t)

    def hand_over(self, names: Sequence[str]) -> None:
        """Let the trajectories of engines continue elsewhere, the oldest first."""
        moved: list[SimTrajectory] = []
        for name in names:
            place = self.engines[name]
            place.engine.release_all()
            for t in place.running_trajectories:
                self._interrupt_turn(t)
                self._add_state_count(AT_ENGINE, -1)
                self._release_assignment(t)
                moved.append(t)
            place.running_trajectories.clear()
        for t in moved:
            self._route(t)

    @property
    def work(self) -> MeasuredWork:
        return self.work_counter.measure_work(round(self.sampled_tokens))

    def _add_state_count(self, state: str, more: int) -> None:
        spent = self.work_counter.occupancy
        spent.set_count(state, spent.read_count(state) + more)

    @property
    def free_capacity(self) -> int:
        """Number of trajectories that an engine could accept at once."""
        seats = sum(place.engine.slots - place.assigned_count for place in self.engines.values())
        idle = sum(
            max(0, p.engine.slots - len(p.running_trajectories)) for p in self.engines.values()
        )
        return min(seats, idle - len(self._queue))

    def balance_load(self, min_version: int = 0) -> None:
        self._update_buckets()
        loads = [
            load_balancer.EngineTotalLoad(
                name,
                p.engine.slots,
                p.engine.running,
                p.engine.waiting,
                p.engine.speed.plateau_batch,
                p.engine.version,
            )
            for name, p in self.engines.items()
        ]
        for move in load_balancer.plan_rebalance(loads, min_version):
            source, target = self.engines[move.source], self.engines[move.target]
            for t in list(source.running_trajectories)[-move.count :]:
                assert t.request is not None
                source.engine.release(t.request)
                self._interrupt_turn(t)
                del source.running_trajectories[t]
                self._submit(t, target)

    def _update_buckets(self) -> None:
        engines = {name: place.engine for name, place in self.engines.items()}
        if not engines:
            return
        rated = {
            n: Rated(e.tensor_parallel_size, round(e.generated_tokens), e.busy_s)
            for n, e in engines.items()
        }
        if self._scheduler.update_engines(rated):
            for t in self.trajectories:
                t.bucket = self._decide_bucket(t, 0).bucket if t.tool_returns else 0
            for t in self._queue:
                t.queue_order = (*self._compute_order(t), t.queue_order[-1])
            self._queue.sort(key=lambda one: one.queue_order)
        degrees = {name: engine.tensor_parallel_size for name, engine in engines.items()}
        for name, bucket in queue_policy.assign_buckets(degrees, self._scheduler.buckets).items():
            self.engines[name].bucket = bucket

    # -- trajectories ------------------------------------------------------------------------------

    def start_trajectory(
        self, group: int, prompt: int, min_version: int, script: TrajectoryScript
    ) -> None:
        t = SimTrajectory(group, prompt, min_version, script, context_tokens=script.prompt_tokens)
        self.trajectories.add(t)
        self._add_state_count(IN_FLIGHT, 1)
        self._begin_turn(t)

    def _begin_turn(self, trajectory: SimTrajectory) -> None:
        trajectory.remaining_tokens = trajectory.script.turns[trajectory.turn_index].tokens
        self._add_state_count(TURN, 1)
        self._route(trajectory)

    def _route(self, trajectory: SimTrajectory) -> None:
        request = self._build_request(trajectory)
        place = self.engines.get(trajectory.cache_engine)
        home = place.load if place is not None else None
        if name := queue_policy.place_request(request, home, self._list_loads, bool(self._queue)):
            return self._send_to_engine(trajectory, self.engines[name])
        self._arrival_count += 1
        trajectory.queue_order = (*self._compute_order(trajectory), self._arrival_count)
        insort(self._queue, trajectory, key=lambda one: one.queue_order)

    def dispatch(self) -> None:
        while self._queue and any(
            len(p.running_trajectories) < p.engine.slots for p in self.engines.values()
        ):
            first = self._queue[:LOOKAHEAD_REQUESTS]
            found = queue_policy.choose_next(
                [self._build_request(t) for t in first], self._list_loads()
            )
            if found is None:
                return
            self._send_to_engine(self._queue.pop(found[0]), self.engines[found[1]])

    def _list_loads(self) -> list[EngineLoad]:
        return [place.load for place in self.engines.values()]

    def _send_to_engine(self, trajectory: SimTrajectory, shard_engine: ShardEngine) -> None:
        self._add_state_count(AT_ENGINE, 1)
        self._submit(trajectory, shard_engine)

    def _submit(self, trajectory: SimTrajectory, shard_engine: ShardEngine) -> None:
        name = shard_engine.engine.name
        if trajectory.assigned_engine != name:
            self._release_assignment(trajectory)
            shard_engine.assigned_count += 1
        known = trajectory.cache_engine == name
        trajectory.assigned_engine = trajectory.cache_engine = name
        shard_engine.running_trajectories[trajectory] = None
        if trajectory.oldest_version < 0:
            trajectory.oldest_version = shard_engine.engine.version
        cached = trajectory.context_tokens if known else 0.0
        trajectory.request = SimRequest(
            trajectory.remaining_tokens,
            trajectory.context_tokens,
            cached,
            lambda: self._on_turn_end(trajectory),
        )
        shard_engine.engine.submit(trajectory.request)

    def _build_request(self, trajectory: SimTrajectory) -> QueuedRequest:
        return QueuedRequest(
            trajectory.min_version, trajectory.cache_engine, self._choose_bucket(trajectory)
        )

    def _choose_bucket(self, trajectory: SimTrajectory) -> int:
        """Return its bucket, or the nearest one with an engine, preferably longer."""
        if len(self._scheduler.buckets) == 1:
            return 0
        there = {
            p.bucket for p in self.engines.values() if p.engine.version >= trajectory.min_version
        }
        return queue_policy.find_nearest_bucket(trajectory.bucket, there)

    def _compute_order(self, trajectory: SimTrajectory) -> tuple[int, ...]:
        return self._scheduler.compute_order(trajectory.group, trajectory.bucket)

    def _decide_bucket(self, trajectory: SimTrajectory, bucket: int) -> queue_policy.BucketDecision:
        path = [returned for returned, _ in trajectory.tool_returns]
        estimate = self._scheduler.length_trees.estimate(trajectory.prompt, path)
        return queue_policy.decide_bucket(estimate, bucket, self._scheduler.buckets)

    def _on_tool_return(self, trajectory: SimTrajectory, returned: ToolReturn) -> None:
        """Update the bucket of a trajectory after a tool return."""
        trajectory.tool_returns.append((returned, round(trajectory.sampled_tokens)))
        if len(self._scheduler.buckets) == 1:
            return
        decision = self._decide_bucket(trajectory, trajectory.bucket)
        trajectory.bucket = decision.bucket
        home = self.engines.get(trajectory.cache_engine)
        if decision.outcome != "causal_signal_agree" or home is None:
            return
        if home.bucket != self._choose_bucket(trajectory):
            self._release_assignment(trajectory)
            trajectory.cache_engine = ""

    def _release_assignment(self, trajectory: SimTrajectory) -> None:
        if trajectory.assigned_engine in self.engines:
            self.engines[trajectory.assigned_engine].assigned_count -= 1
        trajectory.assigned_engine = ""

    def _interrupt_turn(self, trajectory: SimTrajectory) -> None:
        """Interrupt a turn, and record the tokens generated so far."""
        request, trajectory.request = trajectory.request, None
        assert request is not None
        self._add_tokens(trajectory, request)
        trajectory.remaining_tokens = request.remaining_tokens

    def _add_tokens(self, trajectory: SimTrajectory, request: SimRequest) -> None:
        trajectory.context_tokens += request.made_tokens
        trajectory.sampled_tokens += request.made_tokens
        self.sampled_tokens += request.made_tokens

    def _on_turn_end(self, trajectory: SimTrajectory) -> None:
        """End a turn, and start its tool."""
        request, trajectory.request = trajectory.request, None
        assert request is not None
        del self.engines[trajectory.assigned_engine].running_trajectories[trajectory]
        self._add_tokens(trajectory, request)
        self._add_state_count(AT_ENGINE, -1)
        self._add_state_count(TURN, -1)
        turn = trajectory.script.turns[trajectory.turn_index]
        if turn.tool_s > 0:
            self._event_queue.schedule_after(turn.tool_s, lambda: self._on_tool_answer(trajectory))
        else:
            self._on_tool_answer(trajectory)
        self.dispatch()

    def _on_tool_answer(self, trajectory: SimTrajectory) -> None:
        trajectory.turn_index += 1
        if trajectory.turn_index < len(trajectory.script.turns):
            turn = trajectory.script.turns[trajectory.turn_index - 1]
            trajectory.context_tokens += turn.answer_tokens
            if turn.tool_return is not None and self._has_length_buckets:
                self._on_tool_return(trajectory, turn.tool_return)
            return self._begin_turn(trajectory)
        self._release_assignment(trajectory)
        if self._has_length_buckets:
            self._scheduler.length_trees.learn(
                PastTrajectory(
                    trajectory.prompt,
                    tuple(trajectory.tool_returns),
                    round(trajectory.sampled_tokens),
                )
            )
        self.trajectories.remove(trajectory)
        self._add_state_count(IN_FLIGHT, -1)
        self.work_counter.trajectories += 1
        self.work_counter.add_trajectory(
            round(trajectory.sampled_tokens), round(trajectory.script.prompt_tokens)
        )
        self._on_end(self, trajectory)
        self.dispatch()
