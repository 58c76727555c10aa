"""What a job asks of the pool, and how far it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job import builtin
from meshrl.common.job.config import PlannerConfig
from meshrl.common.job.emulation import parse_emulation_scale
from meshrl.common.job.isolation.runners import ContainerRunner
from meshrl.common.job.isolation.tiers import RUNNER
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measurements import Measurements
from meshrl.common.state.pool.workers.rows import ExpertSplit


@dataclass(frozen=True, slots=True)
class JobRequirements:
    """What a job asks for. `least` and `most` are workers of all its roles together."""

    ranks: int = 1  # of its core, a worker each
    # the first of them, with attention, which want faster accelerators than the others, which have
    # a mixture's experts; 0: all are alike
    attention: int = 0
    divides: bool = False  # whether the planner finds how many these are
    apart: ExpertSplit | None = None  # what it has found; None: nothing, or it is not asked
    kinds: tuple[str, ...] = ()  # of the accelerators that it has found that for
    rolls_out: bool = True  # whether anything is generated for it
    alternates: bool = True  # whether its engines can compute by turns with its core
    scoring: bool = False  # whether it has frozen models, which one worker hosts
    shards: int = 1
    sandboxes: int = 0
    # The isolation that a host has which its sandboxes are on, where its model's code runs in them;
    # empty: any.
    tier: str = ""
    least: int = 0  # workers that it runs with at least; 0: its floor
    most: int = 0  # 0: as many as there are
    priority: int = 0  # higher ones take from lower ones
    share: float = 1.0  # weight beside jobs of the same priority
    bytes: int = 0  # of its trained model's parameters in float32; 0: not known
    adapters: bool = False  # low-rank adapters are trained in place of the model
    moments: int = 2  # of the optimizer, each as large as what is trained
    helped: bool = True  # whether others than its core can compute gradients for it
    half: bool = False  # its engines have the parameters in 16 bits
    degrees: tuple[int, ...] = (1,)  # rising; workers of one host that an engine of it may have

    @property
    def worker_floor(self) -> int:
        """Workers for the core, the smallest engine and the frozen models, each of its own."""
        return self.ranks + self.smallest_engine * int(self.rolls_out) + int(self.scoring)

    @property
    def smallest_engine(self) -> int:
        """Workers of its smallest engine."""
        return self.degrees[0]


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of the mesh as the planner sees it."""

    id: str
    phase: Phase
    need: JobRequirements = JobRequirements()
    config: PlannerConfig = field(default_factory=PlannerConfig)  # of its split's policy
    groups_per_step: int = 1
    group_size: int = 1
    max_staleness: int = 2
    slots: int = 64  # sequences that an engine decodes together
    bin_tokens: int = 0  # of a bin, which one worker computes; 0: not known
    steps: int = 0  # that it is to make; 0: not known
    rejected: int = 0  # trajectories so far that came back too old
    submitted_ms: int = 0
    steps_done: int = 0
    held: str = ""  # `waiting: WHY` or `paused: WHY`; empty: it runs
    checkpointed: bool = False  # whether a committed checkpoint holds all that it would go on from
    measured: Measurements = field(default_factory=Measurements)
    pace: str = ""  # that its engines imitate; empty: their own
    training_pace: str = ""  # that who trains it imitates; empty: their own
    model: str = ""  # that its workers compute, by which their speeds are remembered
    shape: ModelShape | None = None  # of that model; None: not known
    progress: dict[str, int] = field(default_factory=dict)  # what each resident has done so far
    recomputes: bool = False  # whether training keeps no activations, and computes them again


def derive_requirements(
    document: Mapping[str, Any], parameters: int | None = None
) -> JobRequirements:
    """What a job asks for, by the document that it was submitted as; `parameters` of its model, if
    that is not packed yet.
    """
    if parameters is None:
        parameters = document.get("bundle", {}).get("parameters", 0)
    pool, models, rollout = document["pool"], document["models"], document["rollout"]
    reward, training = document["reward"], document["training"]
    sandboxed = document["environment"]["tools"] or reward["use"] or reward["parts"]
    degrees = tuple(sorted(set(rollout["tensor_parallel"])))
    return JobRequirements(
        ranks=training["ranks"],
        attention=training.get("zebra", {}).get("attention", 0),
        divides=training.get("zebra", {}).get("auto", False),
        rolls_out=document["algorithm"]["name"] != "sft",
        scoring=any(model["path"] for model in models.values()),
        # A server computes when it likes, and an engine of several workers on all of them at once.
        alternates=rollout["engine"] != "sglang" and degrees[0] == 1,
        shards=rollout["shards"],
        sandboxes=document["sandbox"]["processes"] if sandboxed else 0,
        tier=_isolation_tier(document),
        least=pool["workers"]["least"],
        most=pool["workers"]["most"],
        priority=pool["priority"],
        share=pool["share"],
        bytes=4 * parameters,
        adapters=bool(document["lora"]["rank"]),
        moments=1 if document["optimizer"]["muon_lr"] else 2,  # Muon has one, AdamW two
        # Not where ranks keep a pace that is theirs alone.
        helped=parse_emulation_scale(training.get("pace", "")) is None
        and not explain_no_hybrids([rollout["dtype"]], training["dtype"]),
        half=rollout["dtype"] != "float32",
        degrees=degrees,
    )


def explain_no_hybrids(published_dtypes: Iterable[str], training_dtype: str) -> str:
    """Why nobody but a job's core can compute its gradients; empty: helpers can. They have what is
    `published_dtypes`, in these types, which has to be what the core makes of its float32 weights
    to compute in the type `training_dtype`. The planner asks so, and the core of those that ask it.
    """
    if not (other := sorted(set(published_dtypes) - {"float32", training_dtype})):
        return ""
    return (
        f"versions are published in {other[0]}, and gradients are computed of {training_dtype}: a "
        "helper would compute other ones than the core"
    )


def _isolation_tier(document: Mapping[str, Any]) -> str:
    """The tier of isolation that the hosts of a job's sandboxes have to have. Whether a runner of
    the job's own works is found out where it is tried: no host tells that of itself.
    """
    reward, sandbox = document["reward"], document["sandbox"]
    rewards = [reward["use"], *(part["use"] for part in reward["parts"])]
    if not builtin.select_jailed([*document["environment"]["tools"].values(), *rewards]):
        return ""
    if sandbox["runner"]:
        return RUNNER if ContainerRunner(tuple(sandbox["runner"])).is_runsc else ""
    return str(sandbox["tier"])
