"""Statistics that processes publish in the registry, as JSON objects there. The planner decides by
some of them, and views show all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self


class Stats:
    """Stats of one kind of process: a dataclass. What is None is not published."""

    def encode(self) -> dict[str, Any]:
        """What the registry gets."""
        known: dict[str, Any] = asdict(self, dict_factory=_drop_none)  # type: ignore[call-overload]
        return known

    @classmethod
    def decode(cls, published: Mapping[str, Any]) -> Self:
        """The stats that `encoded` made an object of; what others publish is left out."""
        names = (one.name for one in fields(cls))  # type: ignore[arg-type]
        return cls(**{name: published[name] for name in names if name in published})


def _drop_none(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in entries if value is not None}


@dataclass
class PauseStats(Stats):
    """Updates of an engine's weights, and the time that its tokens stood for them."""

    applied: int = 0  # updates that ended, whole or not
    pause_ms: float = 0.0  # of the last
    pause_p50_ms: float = 0.0
    pause_p99_ms: float = 0.0
    engine_step_ms: float = 0.0  # the median step, to compare


@dataclass
class KVStats(Stats):
    """Keys and values that an engine keeps outside of its cache, and that it loaded."""

    again: int | None = None  # tokens that were computed although they had been kept
    loaded: dict[str, int] = field(default_factory=dict)  # tokens that came, by where from
    bytes_in: dict[str, int] = field(default_factory=dict)
    bytes_out: dict[str, int] | None = None  # by tier
    sought: int | None = None  # tokens of prefixes that were looked for
    not_kept: int | None = None  # chunks for which there was no room, or no time
    saved_s: float = 0.0  # that computing would have taken
    used: dict[str, int] | None = None  # bytes, by tier
    refused: list[str] | None = None  # why something could not be kept lately


@dataclass
class EngineStats(PauseStats):
    """An engine process, beside what all residents publish."""

    ready: bool = True
    version: int = -1
    tokens: int = 0  # generated
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    requests: dict[str, int] = field(default_factory=dict)  # that are out, by shard
    plateau: int = 0  # batch size from which throughput stays; 0: not measured yet
    path: str = ""  # what computes, for people
    tensor_parallel: int = 1
    preempted: int = 0
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    cache_bytes_per_token: int = 0  # 0: it takes no keys and values over
    start_s: float = 0.0  # until it first had weights
    throughput: dict[str, float] = field(default_factory=dict)  # tokens/s by BATCHxCONTEXT
    context: float = 0.0  # tokens of a request, in the mean
    running_s: float = 0.0  # summed over requests
    waiting_s: float = 0.0
    pulls: int = 0  # versions received
    pull_s: float = 0.0  # of the last
    curve: list[float] | None = None  # of a decode step; see `DecodeCurve.encode`
    kv: KVStats | None = None
    weights_way: dict[str, Any] | None = None  # how the last version came, and why so
    paced: int | None = None  # steps at an emulated pace, and those of them that ended late
    late: int | None = None
    tokens_cached: int | None = None  # that an SGLang server found in caches of its own


@dataclass
class RoutingStats(Stats):
    """The routing of a rollout shard."""

    continued: int = 0  # trajectories that went on elsewhere after their engine failed
    moved: int = 0  # moves made because another engine was better
    caches: dict[str, int] = field(default_factory=dict)  # what became of those left behind
    decisions: dict[str, int] = field(default_factory=dict)  # on buckets, by outcome
    buckets: dict[str, int] = field(default_factory=dict)  # of engines, by name


@dataclass
class ShardStats(RoutingStats):
    """A rollout shard that serves its job."""

    in_flight: int = 0  # trajectories
    waiting: int = 0  # of them, without an engine
    bounds: list[int] = field(default_factory=list)  # of the lengths' histogram
    histogram: list[int] = field(default_factory=list)
    tokens: int = 0  # sampled
    groups: int = 0  # finished
    work: dict[str, float] = field(default_factory=dict)  # see `measured.told`
    lengths: list[float] | None = None  # of ended trajectories, once they are enough
    environments: dict[str, int] = field(default_factory=dict)  # pids, by name of the process
    environments_stopped: dict[str, int] = field(default_factory=dict)  # ms of the wall clock


@dataclass
class EmulationStats(Stats):
    """Pieces of arithmetic at an emulated pace, and those of them that ended late."""

    paced: int | None = None
    late: int | None = None


@dataclass
class CoreStats(EmulationStats):
    """The core of a training gang, beside what all residents publish."""

    ready: bool = False
    published: list[str] = field(default_factory=list)  # types of its versions' numbers
    phase: str = ""  # of its step
    progress: list[float] = field(default_factory=list)  # whatever of these moves, it goes on
    step: int = 0  # committed
    tokens: int = 0  # trained
    busy_s: float = 0.0
    wait_s: float = 0.0
    work: dict[str, float] = field(default_factory=dict)  # see `measured.told`
    parts: dict[str, float] = field(default_factory=dict)  # seconds of the last step, by part
    bin_tokens_per_s: dict[str, float] = field(default_factory=dict)  # by the tokens of a bin
    warm_start: float = 0.0  # share of it that is done
    hybrids: dict[str, str] = field(default_factory=dict)  # the stage of each


@dataclass
class RankStats(EmulationStats):
    """A rank beside the first, beside what all residents publish."""

    ready: bool = True
    group: int = 0  # generation of the gang's process group; 0: it is in none
    epoch: int = 0  # of the last wish
    tier: str = ""


@dataclass
class HybridStats(EmulationStats):
    """A hybrid, beside what all residents publish."""

    ready: bool = True
    joined: int = 0  # generation of its join; 0: it has not joined
    rounds: int = 0  # computed
    bins: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True)
class HostLoadStats(Stats):
    """Room of a host and use of its processors. None: not measured yet."""

    memory_left_bytes: int | None = None
    disk_left_bytes: int | None = None
    cores: float | None = None  # processors that its processes share
    busy_cores: float | None = None  # of these, that were busy in the last seconds


@dataclass(frozen=True)
class HeadLatencyStats(Stats):
    """Distance of a host to the head. None: not measured yet."""

    trip_ms: float | None = None  # to Redis and back
    ahead_ms: float | None = None  # of this host's clock before that of Redis' host


@dataclass(frozen=True)
class NodeStats(HostLoadStats, HeadLatencyStats):
    """Statistics of a host's agent."""

    workers: int = 0  # that run
    adopted: int = 0  # of these, that an earlier incarnation had started
    services: int = 0  # shards and sandboxes that run
    adopted_services: int = 0
    takes: Sequence[str] | None = None  # services that may be placed there
    tiers: Sequence[str] | None = None  # of isolation, for its sandboxes; None: nobody asks
    bulk_sent: int | None = None  # bytes of the bulk port; None: it has none


@dataclass(frozen=True, slots=True)
class InstanceStats(Stats):
    """Process of a resident on a worker."""

    resident: str
    job: str
    role: str
    state: str
    tier: str
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True)
class SliceStats(Stats):
    """Turns of the gang that a worker keeps."""

    turns: int = 0  # granted so far
    turns_killed: int = 0
    turn_of: Sequence[str] = ()  # residents that have one now


@dataclass(frozen=True, slots=True)
class WorkerStats(SliceStats):
    """Statistics of a worker."""

    worker: str = ""
    accelerator: str = ""
    gang: str = ""  # empty: idle
    rank: int = 0
    held_bytes: Mapping[str, int] | None = None  # by tier, and of its budget
    residents: Sequence[InstanceStats] = ()


@dataclass(frozen=True, slots=True)
class PlannerStats(Stats):
    """Statistics of a planner. None: it stands by."""

    leader: bool = False
    look_ms: float | None = None
    decide_ms: float | None = None
    write_ms: float | None = None
    workers: int | None = None
    jobs: int | None = None
