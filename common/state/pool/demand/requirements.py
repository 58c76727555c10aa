"""Requirements of a job on the pool, and its progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job import builtin
from meshrl.common.job.config import JobConfig, PlannerConfig
from meshrl.common.job.emulation import parse_emulation_scale
from meshrl.common.job.evaluation_plan import can_evaluate
from meshrl.common.job.isolation.runners import ContainerRunner
from meshrl.common.job.isolation.tiers import RUNNER
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measurements import Measurements
from meshrl.common.state.pool.demand.role_memory import RoleMemory, derive_role_memory
from meshrl.common.state.pool.workers.rows import MARKETS, PREEMPTIBLE_MARKETS, ExpertSplit


@dataclass(frozen=True, slots=True)
class MarketLimits:
    """Markets whose workers a job takes, how many of each, and what an hour of all may cost."""

    accepted: tuple[str, ...] = MARKETS
    most_spot: int = 0  # 0: unlimited
    most_lent: int = 0  # 0: unlimited
    max_cost_per_hour: float = 0.0  # 0: unlimited
    # of the planner: workers that may vanish, of all such markets together; None: not measured
    most_preemptible: int | None = None

    def count_within(self, workers_by_market: Mapping[str, int]) -> int:
        """Return how many of these workers are within the limits on their markets."""
        found = {m: min(workers_by_market.get(m, 0), self.get_most(m)) for m in MARKETS}
        vanishing = sum(found[market] for market in PREEMPTIBLE_MARKETS)
        if self.most_preemptible is not None:
            vanishing = min(vanishing, self.most_preemptible)
        return int(found[MARKETS[0]] + vanishing)

    def get_most(self, market: str) -> float:
        """Return the maximum number of workers of a market; infinite: unlimited."""
        if market not in self.accepted:
            return 0
        return {"spot": self.most_spot, "lent": self.most_lent}.get(market, 0) or math.inf


@dataclass(frozen=True, slots=True)
class JobRequirements:
    """Requirements of a job. `min_workers` and `max_workers` count the workers of all its roles."""

    ranks: int = 1  # of its core, one worker each
    # Number of attention ranks, which come first and need faster accelerators than the expert ranks
    # of a mixture; 0: all ranks are alike.
    attention_ranks: int = 0
    auto_expert_split: bool = False  # True if the planner chooses `attention_ranks`
    expert_split: ExpertSplit | None = None  # the planner's choice; None: none
    expert_split_kinds: tuple[str, ...] = ()  # accelerator kinds of that choice
    needs_rollout: bool = True  # True if the job generates trajectories
    seeding: bool = True  # True if engines on the core's workers may stop within a step
    can_time_slice: bool = (
        True  # True if its engines can share workers with its core by time slices
    )
    colocate: str = "auto"  # pool.colocate: auto, always or never
    needs_scoring: bool = False  # True if it has frozen models, which one worker hosts
    # True if frozen models can share a worker with its core by time slices
    can_share_scoring: bool = True
    shards: int = 1
    sandboxes: int = 0
    # Isolation tier that its sandboxes need on a host, if they run the model's code; empty: any.
    isolation_tier: str = ""
    min_workers: int = 0  # minimum number of workers; 0: its floor
    max_workers: int = 0  # maximum number of workers; 0: unlimited
    markets: MarketLimits = MarketLimits()
    priority: int = 0  # jobs of higher priority take workers from lower ones
    share: float = 1.0  # weight among jobs of the same priority
    memory: RoleMemory = field(default_factory=RoleMemory)  # minimum of its instances
    allows_hybrids: bool = True  # True if hybrids can compute gradients for its core
    gradient_bytes: int = 0  # that a hybrid sends in a step; 0: few, or unknown
    # ascending: possible numbers of workers of an engine, on one host
    tensor_parallel: tuple[int, ...] = (1,)

    @property
    def worker_floor(self) -> int:
        """Workers for the core, the smallest engine and the frozen models. Engines take time slices
        of the core's workers only if they always do, frozen models never.
        """
        engine = self.smallest_engine if self.needs_rollout and not self.is_colocated else 0
        return self.ranks + engine + int(self.needs_scoring)

    @property
    def time_sliced_floor(self) -> int:
        """Workers for its instances where they share the core's workers by time slices."""
        engine = self.smallest_engine if self.needs_rollout and not self.can_time_slice else 0
        return self.ranks + engine + int(self.needs_scoring and not self.can_share_scoring)

    @property
    def is_colocated(self) -> bool:
        """True if each worker of the core always hosts an engine too."""
        return self.colocate == "always" and self.can_time_slice and self.needs_rollout

    @property
    def smallest_engine(self) -> int:
        """Workers of its smallest engine."""
        return self.tensor_parallel[0]


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """Job of the mesh in the planner's view."""

    id: str
    phase: Phase
    requirements: JobRequirements = JobRequirements()
    # of the policy that splits its workers
    config: PlannerConfig = field(default_factory=PlannerConfig)
    groups_per_step: int = 1
    group_size: int = 1
    max_staleness: int = 2
    slots: int = 64  # sequences in an engine's decode batch
    bin_tokens: int = 0  # of a bin, which one worker computes; 0: unknown
    total_steps: int = 0  # in its budget; 0: unknown
    rejected_trajectories: int = 0  # stale trajectories so far
    submitted_ms: int = 0
    steps_done: int = 0
    block_reason: str = ""  # block reason, `waiting: WHY` or `paused: WHY`; empty: it runs
    has_checkpoint: bool = False  # True if a committed checkpoint holds all state to resume from
    measurements: Measurements = field(default_factory=Measurements)
    emulated_engine: str = ""  # emulated speed of its engines; empty: none
    emulated_training: str = ""  # emulated speed of its training; empty: none
    model_key: str = ""  # key under which its workers' speeds are stored
    model_shape: ModelShape | None = None  # of that model; None: unknown
    instance_progress: dict[str, int] = field(default_factory=dict)  # work of each instance so far
    activation_checkpointing: bool = False  # True if training recomputes activations
    gradient_transfer_s: float = 0.0  # seconds in which a hybrid sends its gradient of a step
    slice_switch_s: float = 0.0  # seconds of a switch between slices of its engine and its core


def derive_requirements(document: Mapping[str, Any]) -> JobRequirements:
    """Return the requirements of a job from its submitted document."""
    pool, models, rollout = document["pool"], document["models"], document["rollout"]
    reward, training = document["reward"], document["training"]
    sandboxed = document["environment"]["tools"] or reward["use"] or reward["parts"]
    degrees = tuple(sorted(set(rollout["tensor_parallel"])))
    colocate = pool.get("colocate", "auto")
    return JobRequirements(
        ranks=training["ranks"],
        attention_ranks=training.get("zebra", {}).get("attention", 0),
        auto_expert_split=training.get("zebra", {}).get("auto", False),
        needs_rollout=_samples_trajectories(document),
        seeding=rollout.get("seeding", "auto") != "off",
        needs_scoring=any(model["path"] for model in models.values()),
        can_share_scoring=colocate != "never",
        # an engine of several workers uses all of them at once
        can_time_slice=degrees[0] == 1 and colocate != "never",
        colocate=colocate,
        shards=rollout["shards"],
        sandboxes=document["sandbox"]["processes"] if sandboxed else 0,
        isolation_tier=_isolation_tier(document),
        min_workers=pool["workers"]["least"],
        max_workers=pool["workers"]["most"],
        markets=MarketLimits(
            accepted=tuple(pool.get("markets", MARKETS)),
            most_spot=pool["workers"].get("most_spot", 0),
            most_lent=pool["workers"].get("most_lent", 0),
            max_cost_per_hour=pool.get("max_cost_per_hour", 0.0),
        ),
        priority=pool["priority"],
        share=pool["share"],
        memory=derive_role_memory(document),
        # Not where ranks emulate a speed of their own.
        allows_hybrids=parse_emulation_scale(training.get("emulate", "")) is None
        and not explain_no_hybrids([rollout["dtype"]], training["dtype"]),
        gradient_bytes=_count_gradient_bytes(document),
        tensor_parallel=degrees,
    )


def shares_core_worker(config: JobConfig) -> bool:
    """Return True if an engine computes on a worker of the core, by time slices.

    The job file says so, or the job's own mesh is too small for an engine beside its other roles.
    """
    requirements = derive_requirements(config.to_document())
    others = requirements.ranks + config.planner.training - 1 + requirements.needs_scoring
    is_small = requirements.needs_rollout and config.mesh.workers <= others
    return requirements.is_colocated or is_small


def shares_scoring_worker(config: JobConfig) -> bool:
    """Return True if frozen models take time slices of the core's workers on the job's own mesh."""
    needs = derive_requirements(config.to_document())
    is_small = config.mesh.workers <= needs.time_sliced_floor
    return needs.needs_scoring and needs.can_share_scoring and is_small


def _count_gradient_bytes(document: Mapping[str, Any]) -> int:
    """Return the bytes of a hybrid's gradient; 0 with adapters, whose gradients are small."""
    parameters = int(document.get("bundle", {}).get("parameters", 0))
    narrow = document["training"].get("gradient_dtype", "float32") != "float32"
    return 0 if document["lora"]["rank"] else parameters * (2 if narrow else 4)


def _samples_trajectories(document: Mapping[str, Any]) -> bool:
    """Return True if engines sample trajectories: to train on, or in evaluations of sft."""
    if document["algorithm"]["name"] != "sft":
        return True
    config = JobConfig.from_document({k: v for k, v in document.items() if k != "bundle"})
    plan = config.evaluation
    return can_evaluate(config) and bool(plan.before or plan.after or plan.every)


def explain_no_hybrids(published_dtypes: Iterable[str], training_dtype: str) -> str:
    """Return why only a job's core can compute its gradients; empty if hybrids can too.

    Hybrids hold the published weights, of `published_dtypes`. To compute in `training_dtype` they
    need the same values that the core derives from its float32 weights. The planner and the core of
    a job both call this.
    """
    if not (other := sorted(set(published_dtypes) - {"float32", training_dtype})):
        return ""
    return (
        f"versions are published in {other[0]}, but gradients are computed in {training_dtype}: a "
        "hybrid's gradients would differ from the core's"
    )


def _isolation_tier(document: Mapping[str, Any]) -> str:
    """Return the isolation tier that the hosts of a job's sandboxes must have.

    Empty if any tier will do, or if the job has a runner of its own: no host reports if it works.
    """
    reward, sandbox = document["reward"], document["sandbox"]
    rewards = [reward["use"], *(part["use"] for part in reward["parts"])]
    if not builtin.select_jailed([*document["environment"]["tools"].values(), *rewards]):
        return ""
    if sandbox["runner"]:
        return RUNNER if ContainerRunner(tuple(sandbox["runner"])).is_runsc else ""
    return str(sandbox["tier"])
