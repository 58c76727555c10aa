"""Statistics that processes publish in the registry, as JSON objects.

The planner uses some of them, and views show all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

SERVER_OF_ENGINE = "{} (SGLang)"  # name of the server beside an engine's process, for users


class Stats:
    """Stats of one kind of process: a dataclass. Fields that are None are not published."""

    # Deprecated keys of fields, by the fields' current names. Both are published, because
    # dashboards of users may read the deprecated ones.
    deprecated_keys: ClassVar[Mapping[str, str]] = {}

    def encode(self) -> dict[str, Any]:
        """Return the published fields."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        found = {name: _encode(value) for name, value in values.items() if value is not None}
        for kind in type(self).__mro__:
            for name, old in vars(kind).get("deprecated_keys", {}).items():
                if name in found:
                    found[old] = found[name]
        return found

    @classmethod
    def decode(cls, published: Mapping[str, Any]) -> Self:
        """Return the stats of published fields; unknown fields are ignored."""
        names = (one.name for one in fields(cls))  # type: ignore[arg-type]
        return cls(**{name: published[name] for name in names if name in published})


def _encode(value: Any) -> Any:
    if isinstance(value, Stats):
        return value.encode()
    if isinstance(value, Mapping):
        return {key: _encode(one) for key, one in value.items()}
    return [_encode(one) for one in value] if isinstance(value, list | tuple) else value


@dataclass
class PauseStats(Stats):
    """Updates of an engine's weights, and the pauses of its token output for them."""

    applied: int = 0  # ended updates, complete or not
    pause_ms: float = 0.0  # of the last update
    pause_p50_ms: float = 0.0
    pause_p99_ms: float = 0.0
    engine_step_ms: float = 0.0  # median step, for comparison


@dataclass
class KVStats(Stats):
    """Keys and values that an engine stores outside its cache, and loads into it."""

    recomputed_tokens: int | None = None  # although they had been offloaded
    loaded_tokens: dict[str, int] = field(default_factory=dict)  # by source
    bytes_in: dict[str, int] = field(default_factory=dict)
    bytes_out: dict[str, int] | None = None  # by tier
    lookup_tokens: int | None = None  # tokens of requested prefixes
    dropped_chunks: int | None = None  # chunks that were not stored for lack of space or time
    saved_s: float = 0.0  # computing time saved
    used_bytes: dict[str, int] | None = None  # by tier
    rejection_reasons: list[str] | None = None  # recent ones, of chunks that were not stored
    deprecated_keys: ClassVar[Mapping[str, str]] = {
        "recomputed_tokens": "again",
        "loaded_tokens": "loaded",
        "lookup_tokens": "sought",
        "dropped_chunks": "not_kept",
        "used_bytes": "used",
        "rejection_reasons": "refused",
    }


@dataclass
class EngineStats(PauseStats):
    """Statistics of an engine process, beside those of all instances."""

    ready: bool = True
    version: int = -1
    leaving: bool = False  # it accepts no requests, and its running ones leave
    tokens: int = 0  # generated
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    requests: dict[str, int] = field(default_factory=dict)  # in flight, by shard
    plateau: int = 0  # batch size from which throughput is constant; 0: not measured yet
    backend: str = ""  # description of the backend, for users
    tensor_parallel: int = 1
    time_sliced: bool = False  # takes time slices with other instances on its workers
    preempted: int = 0  # times that a request lost its cache to older ones
    cache_tokens: int = 0  # tokens that its cache holds; 0: not known, or before the first weights
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    cache_bytes_per_token: int = 0  # 0: it cannot take over caches
    start_s: float = 0.0  # from its start to its first weights
    starting: str | None = None  # what it waits for before it is ready
    throughput: dict[str, float] = field(default_factory=dict)  # tokens/s by BATCHxCONTEXT
    context: float = 0.0  # mean tokens of a request
    running_s: float = 0.0  # summed over requests
    waiting_s: float = 0.0
    pulls: int = 0  # versions received
    pull_s: float = 0.0  # of the last version
    decode_curve: list[float] | None = None  # of a decode step; see `DecodeCurve.encode`
    kv: KVStats | None = None
    # transport of the last version, and the reason for it
    weights_transport: dict[str, Any] | None = None
    # transport of the last version to the SGLang server, and the reason for it
    server_transport: dict[str, Any] | None = None
    emulated_count: int | None = None  # emulated steps
    late_count: int | None = None  # of these: steps that ended late
    tokens_cached: int | None = None  # found by an SGLang server in its own caches
    deprecated_keys: ClassVar[Mapping[str, str]] = {
        "backend": "path",
        "decode_curve": "curve",
        "weights_transport": "weights_way",
        "emulated_count": "paced",
        "late_count": "late",
    }


@dataclass
class RoutingStats(Stats):
    """Routing statistics of a rollout shard."""

    continued: int = 0  # trajectories that continued elsewhere after their engine failed
    moved: int = 0  # moves to a better engine
    caches: dict[str, int] = field(default_factory=dict)  # fate of the caches that were left behind
    decisions: dict[str, int] = field(default_factory=dict)  # on buckets, by outcome
    buckets: dict[str, int] = field(default_factory=dict)  # of engines, by name
    handovers: int = 0  # of engines whose seeding window ended while they had requests
    handover_s: float = 0.0  # of the last one: until the engine had none left


@dataclass
class ShardStats(RoutingStats):
    """Statistics of a rollout shard that serves its job."""

    in_flight: int = 0  # trajectories
    waiting: int = 0  # of these, without an engine
    bounds: list[int] = field(default_factory=list)  # of the lengths' histogram
    histogram: list[int] = field(default_factory=list)
    tokens: int = 0  # sampled
    groups: int = 0  # finished
    work: dict[str, float] = field(default_factory=dict)  # see `measurements.encode_work`
    lengths: list[float] | None = None  # of ended trajectories, once there are enough
    environments: dict[str, int] = field(default_factory=dict)  # pids, by name of the process
    environments_stopped: dict[str, int] = field(default_factory=dict)  # ms of the wall clock


@dataclass
class EmulationStats(Stats):
    """Emulated computations, and those of them that ended late."""

    emulated_count: int | None = None
    late_count: int | None = None
    deprecated_keys: ClassVar[Mapping[str, str]] = {"emulated_count": "paced", "late_count": "late"}


@dataclass
class CoreStats(EmulationStats):
    """Statistics of a training gang's core, beside those of all instances."""

    ready: bool = False
    published: list[str] = field(default_factory=list)  # dtypes of its versions
    phase: str = ""  # of its step
    progress: list[float] = field(default_factory=list)  # a change of any entry is progress
    step: int = 0  # committed
    tokens: int = 0  # trained
    busy_s: float = 0.0
    wait_s: float = 0.0
    work: dict[str, float] = field(default_factory=dict)  # see `measurements.encode_work`
    parts: dict[str, float] = field(default_factory=dict)  # seconds of the parts of the last step
    bin_tokens_per_s: dict[str, float] = field(default_factory=dict)  # by the tokens of a bin
    warm_start: float = 0.0  # completed share
    hybrids: dict[str, str] = field(default_factory=dict)  # stage of each
    # seconds from a hybrid's sum of gradients until all ranks have it; 0: not measured
    gradient_transfer_s: float = 0.0


@dataclass
class RankStats(EmulationStats):
    """Statistics of a rank other than 0, beside those of all instances."""

    ready: bool = True
    group: int = 0  # generation of the gang's process group; 0: none
    epoch: int = 0  # of the last desired state
    tier: str = ""


@dataclass
class HybridStats(EmulationStats):
    """Statistics of a hybrid, beside those of all instances."""

    ready: bool = True
    joined: int = 0  # generation of its join; 0: not joined
    rounds: int = 0  # computed
    bins: int = 0
    busy_s: float = 0.0
    sent_bytes: int = 0  # of gradients


@dataclass(frozen=True)
class HostLoadStats(Stats):
    """Free space of a host and use of its processors. None: not measured yet."""

    memory_left_bytes: int | None = None
    disk_left_bytes: int | None = None
    cores: float | None = None  # processors that its processes share
    busy_cores: float | None = None  # busy processors in the last seconds


@dataclass(frozen=True)
class HeadLatencyStats(Stats):
    """Latency of a host to the head. None: not measured yet."""

    redis_round_trip_ms: float | None = None
    clock_ahead_ms: float | None = None  # lead of this host's clock over that of Redis' host
    deprecated_keys: ClassVar[Mapping[str, str]] = {
        "redis_round_trip_ms": "trip_ms",
        "clock_ahead_ms": "ahead_ms",
    }


@dataclass(frozen=True)
class NodeStats(HostLoadStats, HeadLatencyStats):
    """Statistics of a host's agent."""

    workers: int = 0  # running
    adopted: int = 0  # of these, started by an earlier incarnation
    services: int = 0  # running shards and sandboxes
    adopted_services: int = 0
    accepted_services: Sequence[str] | None = None
    isolation_tiers: Sequence[str] | None = None  # of its sandboxes; None: not probed
    bulk_sent: int | None = None  # bytes by the bulk port; None: it has none
    deprecated_keys: ClassVar[Mapping[str, str]] = {
        "accepted_services": "takes",
        "isolation_tiers": "tiers",
    }


@dataclass(frozen=True, slots=True)
class InstanceStats(Stats):
    """State of an instance's process on a worker."""

    instance: str
    job: str
    role: str
    phase: str
    tier: str
    pid: int
    restarts: int
    deprecated_keys: ClassVar[Mapping[str, str]] = {"instance": "resident", "phase": "state"}


@dataclass(frozen=True, slots=True)
class SliceStats(Stats):
    """Time slices of the gang that a worker schedules."""

    granted_slices: int = 0
    killed_slices: int = 0
    slice_holders: Sequence[str] = ()  # instances that have a time slice now
    slice_switch_s: float = 0.0  # moves of tensors before slices
    slice_loaded_bytes: int = 0  # of these, to the accelerators
    slice_hidden_bytes: int = 0  # loaded by prefetches while others computed
    deprecated_keys: ClassVar[Mapping[str, str]] = {
        "granted_slices": "turns",
        "killed_slices": "turns_killed",
        "slice_holders": "turn_of",
    }


@dataclass(frozen=True, slots=True)
class WorkerStats(SliceStats):
    """Statistics of a worker."""

    worker: str = ""
    accelerator: str = ""
    gang: str = ""  # empty: idle
    rank: int = 0
    used_bytes: Mapping[str, int] | None = None  # by tier, and of its budget
    instances: Sequence[InstanceStats] = ()
    deprecated_keys: ClassVar[Mapping[str, str]] = {
        "used_bytes": "held_bytes",
        "instances": "residents",
    }


@dataclass(frozen=True, slots=True)
class PlannerStats(Stats):
    """Statistics of a planner. None: the planner stands by."""

    leader: bool = False
    snapshot_ms: float | None = None
    decide_ms: float | None = None
    write_ms: float | None = None
    workers: int | None = None
    jobs: int | None = None
    deprecated_keys: ClassVar[Mapping[str, str]] = {"snapshot_ms": "look_ms"}
