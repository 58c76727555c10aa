"""Queues of engines: a trajectory joins the shortest queue of its bucket. It changes its bucket
when tool returns predict another length.

A trajectory stays at the engine with its KV cache while that has room in its batch. A new or
orphaned one goes to the admissible engine with the fewest requests, if one is below its limit, and
waits otherwise. This is join-shortest-queue with delayed dispatch (RLBoost, arXiv 2510.19225,
Algorithm 2, SelectInstance).

Engines form buckets by length (C-MLFQ: Libra, arXiv 2606.03077). Each trajectory starts in the
first bucket, the short one; `decide_bucket` is called at each tool return.

The router and the simulated shard (`sim/cluster/model/shard.py`) call these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.services.rollout.routing.length_trees import LengthEstimate


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Engines for trajectories with at most `max_tokens` remaining tokens."""

    max_tokens: int
    batch_size: int  # requests that one of its engines decodes together
    share: float = 1.0  # share of the job's engines, relative to other buckets


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one engine for the queues."""

    name: str
    max_requests: int  # limit of requests from this shard
    running: int  # requests from this shard
    version: int  # version of its weights
    bucket: int = 0
    slots: int = 1 << 30  # trajectories in its KV cache
    used_slots: int = 0
    other_requests: int = 0  # requests from elsewhere
    free_slots: int = field(init=False, compare=False)  # trajectories that it could accept now

    def __post_init__(self) -> None:
        free_slots = max(0, min(self.max_requests - self.running, self.slots - self.used_slots))
        object.__setattr__(self, "free_slots", free_slots)

    @property
    def load_share(self) -> float:
        """Share of its batch in use, above 1 when requests wait."""
        return (self.running + self.other_requests) / self.max_requests


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Request without an engine; weights below `min_version` must not serve it."""

    min_version: int
    cache_engine: str = ""  # the engine with its KV cache; empty: none
    bucket: int = 0


def choose_engine(engines: Iterable[EngineLoad], request: QueuedRequest) -> str | None:
    """Choose the engine for one request; None: it waits.

    The engine with its cache needs no new slot. Other buckets serve it when its own is full.
    """
    admissible = [e for e in engines if e.version >= request.min_version]
    if any(e.name == request.cache_engine and e.running < e.max_requests for e in admissible):
        return request.cache_engine
    free = [e for e in admissible if e.free_slots]
    best = min(free, key=lambda e: (e.bucket != request.bucket, *_sort_key(e)), default=None)
    return best.name if best else None


def place_request(
    request: QueuedRequest,
    cache_engine: EngineLoad | None,
    engines: Callable[[], Iterable[EngineLoad]],
    has_queue: bool,
) -> str | None:
    """Place a new request; None: it waits. Behind a queue it waits unless the engine with its cache
    has room.
    """
    name = choose_engine([cache_engine], request) if cache_engine is not None else None
    name = name or choose_engine(engines(), request)
    return None if has_queue and name != request.cache_engine else name


def find_nearest_bucket(desired: int, buckets: Collection[int]) -> int:
    """Find the nearest bucket with engines to the desired one; of equal ones the longer."""
    return min(buckets, key=lambda b: (abs(b - desired), -b), default=desired)


def choose_next(
    queue: Sequence[QueuedRequest], engines: Sequence[EngineLoad]
) -> tuple[int, str] | None:
    """Choose the next request of the queue and its engine; None: all wait.

    The queue is in order. The first request with room at its preferred place goes first: at the
    engine with its cache, or in its bucket if it has no cache. Sending the head of the queue
    anywhere would recompute its cache, while the free engine often has the cache of a request just
    behind it. Room that no request prefers goes to the first admissible request.
    """
    homes = {e.name: e for e in engines}
    free = sorted((e for e in engines if e.free_slots), key=_sort_key)
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
    """Find the first engine that may serve a request."""
    for e in free:
        if e.version >= request.min_version and (not of_bucket or e.bucket == request.bucket):
            return e
    return None


def _sort_key(engine: EngineLoad) -> tuple[float, int, str]:
    return engine.load_share, engine.used_slots, engine.name


def assign_buckets(engines: Mapping[str, int], buckets: Sequence[LengthBucket]) -> dict[str, int]:
    """Assign a bucket to each engine by its degree of tensor parallelism.

    Small degrees serve short buckets, as short contexts use them best. Names break ties, so that
    all shards agree. Each bucket gets one engine before shares count. With fewer engines than
    buckets, the longest bucket is used beside the shortest ones.
    """
    order = sorted(engines, key=lambda name: (engines[name], name))
    used = list(range(len(buckets)))
    if len(order) < len(buckets):
        used = [*used[: max(1, len(order)) - 1], used[-1]] if len(order) > 1 else used[:1]
    counts = _apportion(len(order), [buckets[b].share for b in used])
    places = [b for b, n in zip(used, counts, strict=True) for _ in range(n)]
    return dict(zip(order, places, strict=True))


def _apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Apportion `total` engines by shares: one each, the others to the bucket furthest below its
    share.
    """
    counts = [1 if i < total else 0 for i in range(len(shares))]
    total_share = sum(shares)
    for _ in range(total - sum(counts)):
        short = [total * share / total_share - n for share, n in zip(shares, counts, strict=True)]
        counts[short.index(max(short))] += 1
    return counts


@dataclass(frozen=True, slots=True)
class BucketDecision:
    """Bucket decision after a tool return; `bucket` is the trajectory's bucket from then on."""

    outcome: str
    bucket: int
    reason: str


def find_bucket(tokens: float, buckets: Sequence[LengthBucket]) -> int:
    """Find the first bucket for the remaining tokens; the last one accepts all longer ones too."""
    fits = (i for i, bucket in enumerate(buckets) if tokens <= bucket.max_tokens)
    return next(fits, len(buckets) - 1)


def decide_bucket(
    estimate: LengthEstimate | None, current: int, buckets: Sequence[LengthBucket]
) -> BucketDecision:
    """Decide whether a trajectory in bucket `current` moves. It moves only if mean and 90th
    percentile of the estimate select the same other bucket.
    """
    if estimate is None:
        return BucketDecision(
            "tree_node_not_found", current, "too few trajectories had such tool returns"
        )
    by_mean = find_bucket(estimate.mean, buckets)
    by_p90 = find_bucket(estimate.p90, buckets)
    observation = (
        f"{estimate.visits} trajectories continued for {estimate.mean:.0f} tokens on average and "
        f"{estimate.p90:.0f} at the 90th percentile after {estimate.depth} such tool returns "
        f"({'this prompt' if estimate.tree == 'prompt' else 'all prompts'})"
    )
    if by_mean != by_p90:
        return BucketDecision(
            "mean_p90_disagree",
            current,
            f"{observation}: mean and percentile give buckets {by_mean} and {by_p90}",
        )
    if by_mean == current:
        return BucketDecision(
            "already_in_target", current, f"{observation}: bucket {current} stays"
        )
    return BucketDecision(
        "causal_signal_agree", by_mean, f"{observation}: bucket {current} to {by_mean}"
    )
