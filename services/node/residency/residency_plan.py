"""Moves of tensor kinds between the tiers of one worker, for the next time slice; pure.

Source: PlexRL's StateManager (arXiv 2605.20863). State moves between accelerator, host memory and
disk; kinds that a function needs late are loaded late, and kinds that are cheap to reload leave
first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.common.api.node import KindUse
from meshrl.common.state.pool.workers.rows import TensorKind, Tier, TierBytes
from meshrl.services.node.instances.budgets import OverBudget
from meshrl.services.node.instances.gpu_memory import GpuMemoryFull
from meshrl.services.node.residency.eviction_choice import Eviction, choose_evictions
from meshrl.services.node.slices.switch_costs import estimate_copy_s

# The order of loading. A step needs the optimizer's state last, and a cache can be computed again.
LOAD_ORDER = (
    TensorKind.PARAMETERS,
    TensorKind.GRADIENTS,
    TensorKind.OPTIMIZER,
    TensorKind.KV_CACHE,
)
MIN_USE_S = 0.1  # sooner uses are equally urgent
MIN_URGENCY = -20.0  # of a kind with an expected use: in 12 days


@dataclass(frozen=True, slots=True)
class KindPlace:
    """Bytes of one kind of an instance's tensors on each tier of a worker."""

    instance: str
    kind: str
    size_bytes: int  # when on the accelerator
    accelerator_bytes: int = 0  # now
    memory_bytes: int = 0  # of its copy there
    disk_bytes: int = 0  # of its copy there
    is_dirty: bool = False  # True: no copy equals the tensors on the accelerator
    can_drop: bool = False  # True: its process rebuilds it without a copy
    growth_bytes: int = 0  # that it may have more when it is used, as it had before

    @property
    def missing_bytes(self) -> int:
        """Bytes that a load adds to the accelerator."""
        return max(0, self.size_bytes - self.accelerator_bytes)

    @property
    def copy_tier(self) -> Tier | None:
        """Fastest tier with an equal copy; None: no tier has one."""
        if self.is_dirty or not (self.memory_bytes or self.disk_bytes):
            return None
        return Tier.MEMORY if self.memory_bytes else Tier.DISK


@dataclass(frozen=True, slots=True)
class ResidencySnapshot:
    """State of a worker from which moves are planned."""

    places: Sequence[KindPlace]
    budgets: TierBytes  # of the worker; 0: unlimited
    other_bytes: TierBytes  # used on each tier by processes that have no kinds
    fixed_instances: frozenset[str] = frozenset()  # whose kinds must stay where they are
    fixed_kinds: frozenset[tuple[str, str]] = frozenset()  # the same, with their instances
    expected: Sequence[KindUse] = ()  # by the next time slices
    rates: Mapping[str, float] = field(default_factory=dict)  # bytes per second, `source>target`
    full_tiers: frozenset[str] = frozenset()  # that have rejected a copy, whatever their budget

    def free_bytes(self, tier: Tier) -> float:
        """Return the free bytes of a tier; infinity without a budget, negative if overdrawn."""
        budget, used = {
            Tier.ACCELERATOR: (self.budgets.accelerator, self.other_bytes.accelerator),
            Tier.MEMORY: (self.budgets.memory, self.other_bytes.memory),
            Tier.DISK: (self.budgets.disk, self.other_bytes.disk),
        }[tier]
        if tier in self.full_tiers:
            return 0.0
        if not budget:
            return float("inf")
        return budget - used - sum(bytes_on(place, tier) for place in self.places)

    def is_fixed(self, place: KindPlace) -> bool:
        """Return True for a kind that must stay where it is."""
        key = place.instance, place.kind
        return place.instance in self.fixed_instances or key in self.fixed_kinds

    def find_next_use_s(self, place: KindPlace) -> float:
        """Return the seconds until a kind is expected to be needed; infinity: unknown."""
        return min(
            (
                use.starts_in_s
                for use in self.expected
                if use.instance == place.instance and (not use.kinds or place.kind in use.kinds)
            ),
            default=math.inf,
        )

    def estimate_s(self, size_bytes: int, source: Tier, target: Tier) -> float:
        """Return the expected seconds of a copy, as a slice scheduler estimates it."""
        return estimate_copy_s(self.rates, size_bytes, source, target)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """Move of one kind, which its process executes."""

    instance: str
    kind: str
    action: str  # load | offload | write_back | drop
    tier: str  # memory | disk; empty for load and drop
    size_bytes: int  # that the accelerator gains or loses; of a write-back: the copy's
    copied_bytes: int  # 0: nothing is copied


def bytes_on(place: KindPlace, tier: Tier) -> int:
    """Return the bytes that a kind takes of a tier now."""
    return {
        Tier.ACCELERATOR: place.accelerator_bytes,
        Tier.MEMORY: place.memory_bytes,
        Tier.DISK: place.disk_bytes,
    }[tier]


def plan_order(
    snapshot: ResidencySnapshot, instance: str, kinds: Collection[str]
) -> list[PlannedMove]:
    """Plan the moves that bring kinds of an instance onto the accelerator; empty kinds: all.

    Evictions come first. Executed in this order, the moves exceed no budget at any time.

    Raises:
        GpuMemoryFull: The kinds do not fit, whatever leaves.
        OverBudget: The tiers have no room for the kinds that must leave.
    """
    requested = [
        place
        for place in snapshot.places
        if place.instance == instance and (not kinds or place.kind in kinds)
    ]
    loads = [place for place in _sort_for_loading(requested) if place.missing_bytes]
    evictions = plan_room(
        snapshot, instance, sum(place.missing_bytes for place in loads), requested
    )
    return [*evictions, *map(_make_load, loads)]


def plan_room(
    snapshot: ResidencySnapshot,
    instance: str,
    needed_bytes: int,
    staying: Iterable[KindPlace] = (),
) -> list[PlannedMove]:
    """Plan the evictions after which the accelerator has `needed_bytes` free for an instance.

    `staying`: kinds of the instance that must stay. Raises the errors of `plan_order`.
    """
    lacking = needed_bytes - snapshot.free_bytes(Tier.ACCELERATOR)
    if lacking <= 0:
        return []
    stay = {(place.instance, place.kind) for place in staying}
    candidates = [
        place
        for place in snapshot.places
        if place.accelerator_bytes
        and (place.instance == instance or not snapshot.is_fixed(place))
        and (place.instance, place.kind) not in stay
    ]
    evictable_bytes = sum(place.accelerator_bytes for place in candidates)
    if not needed_bytes:  # the budget is overdrawn, and the kinds themselves are there already
        lacking = min(lacking, evictable_bytes)
        if lacking <= 0:
            return []
    if evictable_bytes < lacking:
        raise GpuMemoryFull(
            f"{instance} needs {needed_bytes} bytes of the accelerator, of whose "
            f"{snapshot.budgets.accelerator} bytes at most "
            f"{max(0, needed_bytes - int(lacking) + evictable_bytes)} can be free for it now",
            where="--accelerator-bytes",
            fix="Place the instance where more memory is free, or declare a larger budget",
        )
    return _plan_evictions(snapshot, instance, candidates, int(lacking))


def plan_prefetch(snapshot: ResidencySnapshot) -> list[PlannedMove]:
    """Plan the load of the missing kind that is needed first, and what leaves for it.

    Only kinds leave that are needed later, by at least the seconds of the moves that this causes.
    So no two kinds displace each other in turn. Empty: nothing that is worth it fits.
    """
    free = snapshot.free_bytes(Tier.ACCELERATOR)
    movable = [place for place in snapshot.places if not snapshot.is_fixed(place)]
    by_use = [(snapshot.find_next_use_s(place), place) for place in _sort_for_loading(movable)]
    for use_s, place in sorted(by_use, key=lambda pair: pair[0]):
        if math.isinf(use_s):
            break
        free -= place.growth_bytes
        if not place.missing_bytes or not (
            place.memory_bytes or place.disk_bytes or place.can_drop
        ):
            continue
        later = [
            other
            for other in movable
            if other.accelerator_bytes
            and snapshot.find_next_use_s(other) >= use_s + _estimate_swap_s(snapshot, place, other)
        ]
        lacking = max(0, int(place.missing_bytes - min(free, place.missing_bytes)))
        evictions = _choose_by_urgency(snapshot, "", later, lacking)
        if evictions is not None:
            return [*evictions, _make_load(place)]
    return []


def _estimate_swap_s(snapshot: ResidencySnapshot, place: KindPlace, other: KindPlace) -> float:
    """Return the seconds to load a kind, and to move another one away and back."""
    size, memory, accelerator = place.missing_bytes, Tier.MEMORY, Tier.ACCELERATOR
    source = place.copy_tier or memory
    costs_s = [option.cost_s for option in _list_options(snapshot, other)]
    return snapshot.estimate_s(size, source, accelerator) + min(costs_s, default=math.inf)


def plan_write_back(snapshot: ResidencySnapshot, reserved_bytes: int = 0) -> list[PlannedMove]:
    """Plan copies of dirty kinds to memory as far as it has room; they stay on the accelerator.

    The kinds that are needed last are first, because they are evicted first. Those that the
    accelerator can hold until they are needed stay as they are. `reserved_bytes`: that the next
    slices compute in, beside those of the present ones.
    """
    room = snapshot.free_bytes(Tier.MEMORY)
    lasting_bytes = (snapshot.budgets.accelerator or math.inf) - reserved_bytes
    lasting_bytes -= snapshot.other_bytes.accelerator
    lasting_bytes -= sum(p.accelerator_bytes for p in snapshot.places if snapshot.is_fixed(p))
    movable = [place for place in snapshot.places if not snapshot.is_fixed(place)]
    leaving = []
    for place in sorted(movable, key=snapshot.find_next_use_s):
        lasting_bytes -= max(place.size_bytes + place.growth_bytes, place.accelerator_bytes)
        if lasting_bytes < 0 or math.isinf(snapshot.find_next_use_s(place)):
            leaving.append(place)
    moves = []
    for place in reversed(leaving):
        is_dirty = place.is_dirty and place.accelerator_bytes and not place.can_drop
        needed = max(0, place.size_bytes - place.memory_bytes)
        if is_dirty and needed <= room:
            room -= needed
            size = place.accelerator_bytes
            moves.append(
                PlannedMove(place.instance, place.kind, "write_back", Tier.MEMORY, size, size)
            )
    return moves


def _plan_evictions(
    snapshot: ResidencySnapshot, instance: str, candidates: list[KindPlace], lacking: int
) -> list[PlannedMove]:
    """Choose the cheapest evictions among the kinds that are needed last.

    Raises OverBudget if the tiers have no room for their copies.
    """
    evictions = _choose_by_urgency(snapshot, instance, candidates, lacking)
    if evictions is not None:
        return evictions
    room = [snapshot.free_bytes(tier) for tier in (Tier.MEMORY, Tier.DISK)]
    memory_room, disk_room = (max(0, int(min(free, 1 << 60))) for free in room)
    raise OverBudget(
        f"{instance} needs {lacking} more bytes of the accelerator, and the kinds that must leave "
        f"do not fit into {memory_room} bytes of memory and {disk_room} bytes of disk that are "
        "free",
        where="--memory-bytes, --disk-bytes",
        fix="Raise the worker's budgets, or place fewer instances on its gang",
    )


def _choose_by_urgency(
    snapshot: ResidencySnapshot, requester: str, candidates: Sequence[KindPlace], lacking: int
) -> list[PlannedMove] | None:
    """Choose the cheapest evictions among the kinds that are needed last; None: they do not fit.

    Kinds of a more urgent class are considered only if the less urgent ones do not suffice.
    """
    if lacking <= 0:
        return []
    room = [snapshot.free_bytes(tier) for tier in (Tier.MEMORY, Tier.DISK)]
    urgencies = {(p.instance, p.kind): _urgency(snapshot, requester, p) for p in candidates}
    for urgency in sorted({*urgencies.values()}):
        options = [
            _list_options(snapshot, place)
            for place in reversed([*_sort_for_loading(candidates)])  # of equal costs the last first
            if urgencies[place.instance, place.kind] <= urgency
        ]
        evictions = choose_evictions(options, lacking, *room)
        if evictions is not None:
            return [*map(_make_eviction, sorted(evictions, key=lambda one: one.cost_s))]
    return None


def _urgency(snapshot: ResidencySnapshot, requester: str, place: KindPlace) -> float:
    """Return how soon a kind is needed: each class has half the seconds of the one before.

    An optimizer without an expected use is the least urgent, since most slices of a training step
    compute gradients only; then come the kinds of instances that do not compute.
    """
    use_s = snapshot.find_next_use_s(place)
    if math.isinf(use_s):
        is_used = place.instance == requester and place.kind != TensorKind.OPTIMIZER
        return -math.inf if not is_used else MIN_URGENCY
    return max(MIN_URGENCY, float(-math.floor(math.log2(max(use_s, MIN_USE_S)))))


def _list_options(snapshot: ResidencySnapshot, place: KindPlace) -> list[Eviction[KindPlace]]:
    """Return the ways in which a kind can leave, with the seconds until it is back again.

    A kind without an equal copy is copied, or dropped if its process can rebuild it; that takes
    about as long as reading it from a disk. A process drops a kind that it should offload if it
    knows that this is cheaper.
    """
    freed = place.accelerator_bytes
    clean_tier = place.copy_tier
    if clean_tier is not None:
        reload_s = snapshot.estimate_s(freed, clean_tier, Tier.ACCELERATOR)
        return [Eviction(place, "offload", clean_tier, freed, reload_s)]
    options = [
        Eviction(
            place,
            "offload",
            tier,
            freed,
            snapshot.estimate_s(freed, Tier.ACCELERATOR, tier)
            + snapshot.estimate_s(freed, tier, Tier.ACCELERATOR),
            # an outdated copy stays until the new one is complete only if there is room for both
            memory_bytes=max(0, place.size_bytes - place.memory_bytes) * (tier == Tier.MEMORY),
            disk_bytes=max(0, place.size_bytes - place.disk_bytes) * (tier == Tier.DISK),
        )
        for tier in (Tier.MEMORY, Tier.DISK)
        if tier not in snapshot.full_tiers
    ]
    if place.can_drop:
        rebuild_s = snapshot.estimate_s(freed, Tier.DISK, Tier.ACCELERATOR)
        options.append(Eviction(place, "drop", "", freed, rebuild_s))
    return options


def _sort_for_loading(places: Iterable[KindPlace]) -> Iterator[KindPlace]:
    order = list(map(str, LOAD_ORDER))
    unknown = len(order)
    return iter(sorted(places, key=lambda p: order.index(p.kind) if p.kind in order else unknown))


def _make_load(place: KindPlace) -> PlannedMove:
    has_copy = bool(place.memory_bytes or place.disk_bytes)
    size = place.missing_bytes
    return PlannedMove(place.instance, place.kind, "load", "", size, size if has_copy else 0)


def _make_eviction(eviction: Eviction[KindPlace]) -> PlannedMove:
    place, action, freed = eviction.item, eviction.action, eviction.freed_bytes
    is_copied = action == "offload" and place.copy_tier is None
    return PlannedMove(
        place.instance, place.kind, action, eviction.tier, freed, freed if is_copied else 0
    )
