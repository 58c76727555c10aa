"""The queues of engines: a trajectory joins the shortest one of its bucket, and changes bucket when
its tools' answers say that it will be longer or shorter than thought.

A trajectory stays with the engine that holds its keys and values while that has room in its batch;
a new or orphaned one goes to the admissible engine with the fewest requests, if one is below its
bound, and waits otherwise: join-shortest-queue with delayed dispatch (RLBoost, arXiv 2510.19225,
Algorithm 2, SelectInstance).

Engines form buckets by the length they are for (C-MLFQ: Libra, arXiv 2606.03077). Everything starts
in the first, the short one; `decide` is asked at each tool return.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.services.rollout.routing.length_trees import LengthEstimate


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Engines for trajectories with at most `max_tokens` tokens still to sample."""

    max_tokens: int
    batch_size: int  # requests that one of its engines decodes together
    share: float = 1.0  # its share of the job's engines, beside the other buckets' shares


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine as the queues see it."""

    name: str
    max_requests: int  # requests that it may have from here
    running: int  # requests that it has from here
    version: int  # version of its weights
    bucket: int = 0
    slots: int = 1 << 30  # trajectories whose keys and values it may hold
    used_slots: int = 0
    other_requests: int = 0  # requests that it has from elsewhere
    room: int = field(init=False, compare=False)  # trajectories that it could take in now

    def __post_init__(self) -> None:
        room = max(0, min(self.max_requests - self.running, self.slots - self.used_slots))
        object.__setattr__(self, "room", room)

    @property
    def load_share(self) -> float:
        """Share of its batch that is taken, above 1 when requests wait."""
        return (self.running + self.other_requests) / self.max_requests


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request without an engine; weights below `floor` may not serve it."""

    min_version: int
    cache_engine: str = ""  # the engine that holds its keys and values; empty: none does
    bucket: int = 0


def choose_engine(engines: Iterable[EngineLoad], request: QueuedRequest) -> str | None:
    """The engine for one request; None: it waits.

    Its home needs no new seat. Other buckets help out when its own is full.
    """
    admissible = [e for e in engines if e.version >= request.min_version]
    if any(e.name == request.cache_engine and e.running < e.max_requests for e in admissible):
        return request.cache_engine
    free = [e for e in admissible if e.room]
    best = min(free, key=lambda e: (e.bucket != request.bucket, *_sort_key(e)), default=None)
    return best.name if best else None


def place_request(
    request: QueuedRequest,
    cache_engine: EngineLoad | None,
    engines: Callable[[], Iterable[EngineLoad]],
    has_queue: bool,
) -> str | None:
    """The engine for one that has just come; None: it waits, as it does behind others that are
    `queued` unless its home, where there is one, has room.
    """
    name = choose_engine([cache_engine], request) if cache_engine is not None else None
    name = name or choose_engine(engines(), request)
    return None if has_queue and name != request.cache_engine else name


def find_nearest_bucket(desired: int, buckets: Collection[int]) -> int:
    """The bucket of those that have engines for one that is meant for `wanted`: the nearest, rather
    the longer one.
    """
    return min(buckets, key=lambda b: (abs(b - desired), -b), default=desired)


def choose_next(
    queue: Sequence[QueuedRequest], engines: Sequence[EngineLoad]
) -> tuple[int, str] | None:
    """Who of the queue, in the order of their turn, goes where now; None: all wait.

    The first that finds room where it belongs goes first: at home, or in its bucket when it has no
    home. Sending the head of the queue anywhere would have it computed again, while the engine that
    has room mostly holds what somebody just behind it needs. Room that nobody belongs to goes to
    the first that may have it.
    """
    homes = {e.name: e for e in engines}
    free = sorted((e for e in engines if e.room), key=_sort_key)
    if not free and not any(e.running < e.max_requests for e in engines):
        return None
    for index, request in enumerate(queue):
        home = homes.get(request.cache_engine)
        if home is not None and home.version >= request.min_version:
            if home.running < home.max_requests:
                return index, home.name
            continue
        if (best := _find_first(free, request, of_bucket=True)) is not None:
            return index, best.name
    for index, request in enumerate(queue if free else ()):
        best = _find_first(free, request, of_bucket=True) or _find_first(
            free, request, of_bucket=False
        )
        if best is not None:
            return index, best.name
    return None


def _find_first(
    free: Iterable[EngineLoad], request: QueuedRequest, of_bucket: bool
) -> EngineLoad | None:
    """The first that may serve a request."""
    for e in free:
        if e.version >= request.min_version and (not of_bucket or e.bucket == request.bucket):
            return e
    return None


def _sort_key(engine: EngineLoad) -> tuple[float, int, str]:
    return engine.load_share, engine.used_slots, engine.name


def assign_buckets(engines: Mapping[str, int], buckets: Sequence[LengthBucket]) -> dict[str, int]:
    """The bucket of each engine, given its degree of tensor parallelism.

    Small degrees go to short buckets, as short contexts use them best; among equals the names
    decide, so that all shards agree. Each bucket gets one engine before shares count; with fewer
    engines than buckets the longest is kept beside the shortest ones.
    """
    order = sorted(engines, key=lambda name: (engines[name], name))
    used = list(range(len(buckets)))
    if len(order) < len(buckets):
        used = [*used[: max(1, len(order)) - 1], used[-1]] if len(order) > 1 else used[:1]
    counts = _apportion(len(order), [buckets[b].share for b in used])
    places = [b for b, n in zip(used, counts, strict=True) for _ in range(n)]
    return dict(zip(order, places, strict=True))


def _apportion(total: int, shares: Sequence[float]) -> list[int]:
    """`total` seats by shares: one each, the others to whoever is furthest below its share."""
    counts = [1 if i < total else 0 for i in range(len(shares))]
    whole = sum(shares)
    for _ in range(total - sum(counts)):
        short = [total * share / whole - n for share, n in zip(shares, counts, strict=True)]
        counts[short.index(max(short))] += 1
    return counts


@dataclass(frozen=True, slots=True)
class BucketDecision:
    """What a tool return led to; `bucket` is where the trajectory belongs from now on."""

    outcome: str
    bucket: int
    reason: str


def find_bucket(tokens: float, buckets: Sequence[LengthBucket]) -> int:
    """The first bucket that is meant for so many tokens; the last takes all longer ones too."""
    fits = (i for i, bucket in enumerate(buckets) if tokens <= bucket.max_tokens)
    return next(fits, len(buckets) - 1)


def decide_bucket(
    estimate: LengthEstimate | None, current: int, buckets: Sequence[LengthBucket]
) -> BucketDecision:
    """Whether a trajectory in bucket `current` should move: only where the mean and the 90th
    percentile of what remains point to the same other bucket.
    """
    if estimate is None:
        return BucketDecision(
            "tree_node_not_found", current, "no such tool returns have been seen often"
        )
    by_mean = find_bucket(estimate.mean, buckets)
    by_p90 = find_bucket(estimate.p90, buckets)
    seen = (
        f"{estimate.visits} trajectories went on for {estimate.mean:.0f} tokens on average and "
        f"{estimate.p90:.0f} at the 90th percentile after {estimate.depth} such tool returns "
        f"({'this prompt' if estimate.tree == 'prompt' else 'all prompts'})"
    )
    if by_mean != by_p90:
        return BucketDecision(
            "mean_p90_disagree", current, f"{seen}: buckets {by_mean} and {by_p90}"
        )
    if by_mean == current:
        return BucketDecision("already_in_target", current, f"{seen}: bucket {current} as it is")
    return BucketDecision("causal_signal_agree", by_mean, f"{seen}: bucket {current} to {by_mean}")
