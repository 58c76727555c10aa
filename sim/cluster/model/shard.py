"""A shard of a job: sends each turn to an engine by the router's own decisions
(`services/rollout/routing`), and counts where the time of its trajectories goes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from meshrl.common.base.occupancy import Occupancy
from meshrl.common.state.pool.demand.measured import MeasuredWork
from meshrl.services.rollout.routing import balance, queues
from meshrl.services.rollout.routing.cmlfq import Scheduler
from meshrl.services.rollout.routing.degree_buckets import MeasuredEngine as Rated
from meshrl.services.rollout.routing.lengths import LengthTrees, Past, ToolReturn
from meshrl.services.rollout.routing.queues import EngineLoad, LengthBucket, QueuedRequest
from meshrl.services.rollout.routing.stay import AT_ENGINE, TURN
from meshrl.services.rollout.worked import IN_FLIGHT, Worked
from meshrl.sim.cluster.model.agenda import Agenda
from meshrl.sim.cluster.model.engine import SimEngine, SimRequest
from meshrl.sim.cluster.model.workload import Script

LOOK_AHEAD = 64  # as of the router


@dataclass(eq=False, slots=True)
class SimTrajectory:
    """One that is under way."""

    group: int
    prompt: int  # the row of the data set
    floor: int  # weights that are older may not serve it
    script: Script
    turn: int = 0
    left: float = 0.0  # tokens of the turn
    context: float = 0.0
    sampled: float = 0.0
    oldest: int = -1  # version of its first token
    home: str = ""  # the engine that holds its cache
    seat: str = ""  # the engine where it has a seat
    request: SimRequest | None = None
    bucket: int = 0
    returns: list[tuple[ToolReturn, int]] = field(default_factory=list)  # and sampled by then
    order: tuple[int, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class SimPlace:
    """An engine as the shard loads it."""

    engine: SimEngine
    bucket: int = 0
    out: dict[SimTrajectory, None] = field(default_factory=dict)  # turns under way, oldest first
    held: int = 0  # trajectories with a seat there
    _load: EngineLoad = field(init=False, repr=False, default=EngineLoad("", 1, 0, -1))

    @property
    def load(self) -> EngineLoad:
        engine, load, out = self.engine, self._load, len(self.out)
        now = (load.running, load.held, load.version, load.bucket)
        if now != (out, self.held, engine.version, self.bucket) or not load.name:
            name, slots = engine.name, engine.slots
            self._load = EngineLoad(name, slots, out, engine.version, self.bucket, slots, self.held)
        return self._load


class Shard:
    """The engines of a shard and the trajectories that stay with them."""

    def __init__(
        self,
        agenda: Agenda,
        over: Callable[[Shard, SimTrajectory], None],
        slots: int,
        longest: int,
        buckets: bool,
    ) -> None:
        """`over` is told of each trajectory that has ended. With `buckets` engines form those of
        their degrees, for trajectories of up to `longest` tokens.
        """
        whole = [LengthBucket(longest, slots)]
        self._scheduler = Scheduler(whole, 1, LengthTrees(), follows=buckets)
        self._learns = buckets
        self.places: dict[str, SimPlace] = {}
        self.worked = Worked(Occupancy(lambda: agenda.now_s))
        self.sampled = 0.0  # tokens
        self.under_way: set[SimTrajectory] = set()
        self._agenda, self._over = agenda, over
        self._queue: list[SimTrajectory] = []
        self._arrivals = 0

    # -- engines -----------------------------------------------------------------------------------

    def join(self, engine: SimEngine) -> None:
        self.places[engine.name] = SimPlace(engine)
        self._follow()
        self.dispatch()

    def leave(self, name: str) -> None:
        """An engine is gone; its trajectories go on elsewhere, from what they have."""
        place = self.places.pop(name)
        place.engine.clear()
        self._follow()
        for t in list(self.under_way):
            if t.seat == name:
                t.seat = ""
        for t in list(place.out):
            self._interrupt(t)
            self._count(AT_ENGINE, -1)
            self._place(t)

    @property
    def work(self) -> MeasuredWork:
        return self.worked.work(round(self.sampled))

    def _count(self, place: str, more: int) -> None:
        spent = self.worked.spent
        spent.put(place, spent.count(place) + more)

    @property
    def room(self) -> int:
        """Trajectories that would find an engine at once."""
        seats = sum(place.engine.slots - place.held for place in self.places.values())
        idle = sum(max(0, p.engine.slots - len(p.out)) for p in self.places.values())
        return min(seats, idle - len(self._queue))

    def look(self) -> None:
        self._follow()
        loads = [
            balance.TotalLoad(
                name,
                p.engine.slots,
                p.engine.running,
                p.engine.waiting,
                p.engine.speed.plateau,
                p.engine.version,
            )
            for name, p in self.places.items()
        ]
        for move in balance.balance(loads, floor=0):
            source, target = self.places[move.source], self.places[move.target]
            for t in list(source.out)[-move.count :]:
                assert t.request is not None
                source.engine.release(t.request)
                self._interrupt(t)
                del source.out[t]
                self._take(t, target)

    def _follow(self) -> None:
        engines = {name: place.engine for name, place in self.places.items()}
        if not engines:
            return
        rated = {n: Rated(e.degree, round(e.tokens), e.busy_s) for n, e in engines.items()}
        if self._scheduler.follow(rated):
            for t in self.under_way:
                t.bucket = self._decided(t, 0).bucket if t.returns else 0
            for t in self._queue:
                t.order = (*self._turn(t), t.order[-1])
            self._queue.sort(key=lambda one: one.order)
        degrees = {name: engine.degree for name, engine in engines.items()}
        for name, bucket in queues.assign(degrees, self._scheduler.buckets).items():
            self.places[name].bucket = bucket

    # -- trajectories ------------------------------------------------------------------------------

    def open(self, group: int, prompt: int, floor: int, script: Script) -> None:
        t = SimTrajectory(group, prompt, floor, script, context=script.prompt)
        self.under_way.add(t)
        self._count(IN_FLIGHT, 1)
        self._begin(t)

    def _begin(self, t: SimTrajectory) -> None:
        t.left = t.script.turns[t.turn].tokens
        self._count(TURN, 1)
        self._place(t)

    def _place(self, t: SimTrajectory) -> None:
        request = self._request(t)
        place = self.places.get(t.home)
        home = place.load if place is not None else None
        if name := queues.place(request, home, self._loads, bool(self._queue)):
            return self._send(t, self.places[name])
        self._arrivals += 1
        t.order = (*self._turn(t), self._arrivals)
        insort(self._queue, t, key=lambda one: one.order)

    def dispatch(self) -> None:
        while self._queue and any(len(p.out) < p.engine.slots for p in self.places.values()):
            first = self._queue[:LOOK_AHEAD]
            found = queues.next_up([self._request(t) for t in first], self._loads())
            if found is None:
                return
            self._send(self._queue.pop(found[0]), self.places[found[1]])

    def _loads(self) -> list[EngineLoad]:
        return [place.load for place in self.places.values()]

    def _send(self, t: SimTrajectory, place: SimPlace) -> None:
        self._count(AT_ENGINE, 1)
        self._take(t, place)

    def _take(self, t: SimTrajectory, place: SimPlace) -> None:
        name = place.engine.name
        if t.seat != name:
            self._free(t)
            place.held += 1
        known = t.home == name
        t.seat = t.home = name
        place.out[t] = None
        if t.oldest < 0:
            t.oldest = place.engine.version
        cached = t.context if known else 0.0
        t.request = SimRequest(t.left, t.context, cached, lambda: self._ended(t))
        place.engine.submit(t.request)

    def _request(self, t: SimTrajectory) -> QueuedRequest:
        return QueuedRequest(t.floor, t.home, self._bucket(t))

    def _bucket(self, t: SimTrajectory) -> int:
        """Its bucket, or the nearest, rather longer, one that has an engine now."""
        if len(self._scheduler.buckets) == 1:
            return 0
        there = {p.bucket for p in self.places.values() if p.engine.version >= t.floor}
        return queues.served(t.bucket, there)

    def _turn(self, t: SimTrajectory) -> tuple[int, ...]:
        return self._scheduler.order(t.group, t.bucket)

    def _decided(self, t: SimTrajectory, bucket: int) -> queues.BucketDecision:
        path = [returned for returned, _ in t.returns]
        estimate = self._scheduler.lengths.estimate(t.prompt, path)
        return queues.decide(estimate, bucket, self._scheduler.buckets)

    def _returned(self, t: SimTrajectory, returned: ToolReturn) -> None:
        """A tool has answered: the trajectory may belong to another bucket now."""
        t.returns.append((returned, round(t.sampled)))
        if len(self._scheduler.buckets) == 1:
            return
        decision = self._decided(t, t.bucket)
        t.bucket = decision.bucket
        home = self.places.get(t.home)
        if decision.outcome != "causal_signal_agree" or home is None:
            return
        if home.bucket != self._bucket(t):
            self._free(t)
            t.home = ""

    def _free(self, t: SimTrajectory) -> None:
        if t.seat in self.places:
            self.places[t.seat].held -= 1
        t.seat = ""

    def _interrupt(self, t: SimTrajectory) -> None:
        """Takes over what an engine has made of a turn."""
        request, t.request = t.request, None
        assert request is not None
        self._made(t, request)
        t.left = request.left

    def _made(self, t: SimTrajectory, request: SimRequest) -> None:
        t.context += request.made
        t.sampled += request.made
        self.sampled += request.made

    def _ended(self, t: SimTrajectory) -> None:
        """A turn is over: its tool begins."""
        request, t.request = t.request, None
        assert request is not None
        del self.places[t.seat].out[t]
        self._made(t, request)
        self._count(AT_ENGINE, -1)
        self._count(TURN, -1)
        turn = t.script.turns[t.turn]
        if turn.tool_s > 0:
            self._agenda.after(turn.tool_s, lambda: self._answered(t))
        else:
            self._answered(t)
        self.dispatch()

    def _answered(self, t: SimTrajectory) -> None:
        t.turn += 1
        if t.turn < len(t.script.turns):
            turn = t.script.turns[t.turn - 1]
            t.context += turn.answer
            if turn.returned is not None and self._learns:
                self._returned(t, turn.returned)
            return self._begin(t)
        self._free(t)
        if self._learns:
            self._scheduler.lengths.learn(Past(t.prompt, tuple(t.returns), round(t.sampled)))
        self.under_way.remove(t)
        self._count(IN_FLIGHT, -1)
        self.worked.trajectories += 1
        self.worked.ended(round(t.sampled), round(t.script.prompt))
        self._over(self, t)
        self.dispatch()
