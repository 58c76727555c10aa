"""Moves of tensor kinds between the tiers of one worker, for the next time slice; pure.

Source: PlexRL's StateManager (arXiv 2605.20863). State moves between accelerator, host memory and
disk; kinds that a function needs late are loaded late, and kinds that are cheap to reload leave
first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.common.state.pool.workers.rows import TensorKind, Tier, TierBytes
from meshrl.services.node.instances.budgets import OverBudget
from meshrl.services.node.instances.gpu_memory import GpuMemoryFull
from meshrl.services.node.residency.eviction_choice import Eviction, choose_evictions

# The order of loading. A step needs the optimizer's state last, and a cache can be computed again.
LOAD_ORDER = (
    TensorKind.PARAMETERS,
    TensorKind.GRADIENTS,
    TensorKind.OPTIMIZER,
    TensorKind.KV_CACHE,
)
# Assumed bytes per second until a direction is measured: pageable copies, and a disk at a share of
# the rate of memory.
ASSUMED_MEMORY_RATE = 1e9
ASSUMED_DISK_SHARE = 0.2


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
    waiting_instances: Sequence[str] = ()  # for time slices; the expected next one first
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

    def estimate_s(self, size_bytes: int, source: Tier, target: Tier) -> float:
        """Return the expected seconds of a copy, by the measured rate if there is one."""
        rate = self.rates.get(f"{source}>{target}", 0.0)
        if not rate:
            way = f"{source}>{target}".replace(Tier.DISK, Tier.MEMORY)
            rate = self.rates.get(way, 0.0) or ASSUMED_MEMORY_RATE
            if Tier.DISK in (source, target):
                rate *= ASSUMED_DISK_SHARE
        return size_bytes / rate


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
        and place.instance not in snapshot.fixed_instances - {instance}
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


def plan_prefetch(
    snapshot: ResidencySnapshot, instance: str, kinds: Collection[str]
) -> list[PlannedMove]:
    """Plan the moves of a prefetch: kinds that fit into room that nothing else needs.

    That is free room, and the room of clean kinds of instances that neither compute nor wait.
    Kinds that do not fit are left out.
    """
    room = snapshot.free_bytes(Tier.ACCELERATOR)
    protected = {instance, *snapshot.fixed_instances, *snapshot.waiting_instances}
    clean = sorted(
        (
            place
            for place in snapshot.places
            if place.accelerator_bytes
            and place.copy_tier is not None
            and place.instance not in protected
        ),
        key=lambda place: min(option.cost_s for option in _list_options(snapshot, place)),
    )
    evictable_bytes = sum(place.accelerator_bytes for place in clean)
    loads = []
    for place in _sort_for_loading(snapshot.places):
        is_requested = place.instance == instance and (not kinds or place.kind in kinds)
        if is_requested and 0 < place.missing_bytes <= room + evictable_bytes:
            room -= place.missing_bytes
            loads.append(place)
    if not loads:
        return []
    evictions = choose_evictions(
        [_list_options(snapshot, place) for place in clean], max(0, int(-min(room, 0.0))), 0, 0
    )
    assert evictions is not None  # nothing is copied, and the loads fit
    return [*map(_make_eviction, evictions), *map(_make_load, loads)]


def plan_write_back(snapshot: ResidencySnapshot) -> list[PlannedMove]:
    """Plan copies of dirty kinds to memory as far as it has room; they stay on the accelerator.

    The kinds that are needed last are first, because they are evicted first.
    """
    room = snapshot.free_bytes(Tier.MEMORY)
    moves = []
    for place in sorted(snapshot.places, key=lambda place: _urgency(snapshot, "", place)):
        is_dirty = place.is_dirty and place.accelerator_bytes and not place.can_drop
        needed = max(0, place.size_bytes - place.memory_bytes)
        if is_dirty and place.instance not in snapshot.fixed_instances and needed <= room:
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

    Kinds of a more urgent class are considered only if the less urgent ones do not suffice.
    """
    room = [snapshot.free_bytes(tier) for tier in (Tier.MEMORY, Tier.DISK)]
    for urgency in sorted({_urgency(snapshot, instance, place) for place in candidates}):
        options = [
            _list_options(snapshot, place)
            for place in reversed([*_sort_for_loading(candidates)])  # of equal costs the last first
            if _urgency(snapshot, instance, place) <= urgency
        ]
        evictions = choose_evictions(options, lacking, *room)
        if evictions is not None:
            return [*map(_make_eviction, sorted(evictions, key=lambda one: one.cost_s))]
    memory_room, disk_room = (max(0, int(min(free, 1 << 60))) for free in room)
    raise OverBudget(
        f"{instance} needs {lacking} more bytes of the accelerator, and the kinds that must leave "
        f"do not fit into {memory_room} bytes of memory and {disk_room} bytes of disk that are "
        "free",
        where="--memory-bytes, --disk-bytes",
        fix="Raise the worker's budgets, or place fewer instances on its gang",
    )


def _urgency(snapshot: ResidencySnapshot, requester: str, place: KindPlace) -> int:
    """Return how soon a kind is needed: 0 for instances that do not wait and for optimizers, the
    highest for the next instance.

    Most slices of a training step compute gradients only.
    """
    if place.kind == TensorKind.OPTIMIZER:
        return 0
    waiting = [instance for instance in snapshot.waiting_instances if instance != requester]
    if place.instance in waiting:
        return 1 + len(waiting) - waiting.index(place.instance)
    return int(place.instance == requester)


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
