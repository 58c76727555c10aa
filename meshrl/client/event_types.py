"""Types of the events of a job, by kind, with the fields of each.

`match event: case StepEvent(): ...` tells the kind. Kinds without a type here are plain `Event`s:
docs/operate/monitoring.md lists them. Events may have further fields, for MeshRL's own use; those
of earlier versions may lack newer ones.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from meshrl.common.state.events import Event


class SubmittedFields(TypedDict):
    job: str
    run_dir: str  # on the mesh's host
    lineage: int
    version: int  # -1: none yet


class PhaseFields(TypedDict):
    job: str
    phase: str  # queued, warm_start, baseline, training, evaluation, finished, failed, stopped
    error: str  # of a failed job


class ChangedFields(TypedDict):
    job: str
    lineage: int
    version: int  # the change holds for later ones
    extended: bool  # the job had finished, and has further steps now


class EvaluationFields(TypedDict):
    job: str
    tag: str  # before, after, or step-N
    lineage: int
    step: int
    version: int
    best: bool  # no version was better so far
    manifest: str  # of the version if it is the newest
    value: NotRequired[float]  # of the figure `evaluation.best`
    problems: int
    sampled: float | None  # mean reward on held-out rows at temperature 1
    greedy: float | None
    figures: dict[str, float]  # by name, such as held_out.sampled
    shares: dict[str, float]  # share of scored samples of each figure
    reasons: dict[str, int]  # why samples have no score, with their numbers
    failed: int  # samples
    mixed: int  # samples of more than one version
    length_mean: NotRequired[float]  # tokens


class FailureFields(TypedDict):
    job: str
    kind: str
    text: str
    fix: str
    where: str  # line of the author's code
    count: int  # trajectories that failed since the last event of this kind and place
    calls: int  # calls that have not returned
    evaluation: bool
    by: str  # the shard


class VersionFields(TypedDict):
    job: str
    lineage: int
    version: int
    manifest: str
    checkpoint: str
    image: str
    masters: str


class StepGroup(TypedDict):
    group: int
    samples: int
    scored: int
    filtered: bool  # equal rewards: it trained nothing


class StepFields(VersionFields):
    step: int
    groups: list[StepGroup]
    metrics: dict[str, Any]  # the row of `metrics.jsonl`


class LineageFields(VersionFields):
    from_lineage: int
    abandoned_steps: int
    returned_groups: int


class OpenedFields(TypedDict):
    job: str
    shard: str
    version: int
    groups: list[int]
    prompts: list[int]  # numbers in the order of the prompts
    samples: int  # trajectories of each


class ReadyFields(TypedDict):
    job: str
    group: int
    samples: int
    scored: int
    digest: str
    by: str


class StaleGroup(TypedDict):
    group: int
    prompt: int
    samples: int
    min_version: int


class StaleFields(TypedDict):
    job: str
    version: int
    groups: list[StaleGroup]


class ReturnedFields(TypedDict):
    job: str
    group: int
    prompt: int
    samples: int  # that had not failed
    failed: int
    reason: str
    by: str


class AdmissionFields(TypedDict):
    job: str
    held: str  # why it does not run; empty: it runs
    before: str
    rule: str


class DesiredFields(TypedDict):
    job: str
    gang: str
    resident: str  # the instance
    role: str
    tier: str
    core: bool
    workers: list[str]
    from_role: str
    from_job: str
    reason: str
    generation: int
    epoch: int
    pinned: bool


class ActualFields(TypedDict):
    job: str
    gang: str
    resident: str  # the instance
    role: str
    status: str
    tier: str
    detail: str
    generation: int
    epoch: int


class ProcessEndedFields(TypedDict):
    name: str
    code: int
    why: str
    job: NotRequired[str]
    times: int  # ends of a process of this name
    count: NotRequired[int]
    final: bool  # it is not started again
    log: str
    error: str


class SubmittedEvent(Event[SubmittedFields]):
    """Submission of a job, or its restoration from its record (`restored`)."""


class PhaseEvent(Event[PhaseFields]):
    """Start of a phase of a job."""


class ChangedEvent(Event[ChangedFields]):
    """Change of keys of a job."""


class EvaluationEvent(Event[EvaluationFields]):
    """Evaluation of a version."""


class FailureEvent(Event[FailureFields]):
    """Failures of trajectories, or hanging calls, of one kind at one place."""


class InitialEvent(Event[VersionFields]):
    """Commit of the first version."""


class StepEvent(Event[StepFields]):
    """Commit of a step, with its version."""


class LineageEvent(Event[LineageFields]):
    """Continuation of a job from an earlier version, in a new lineage."""


class OpenedEvent(Event[OpenedFields]):
    """Start of groups of trajectories."""


class ReadyEvent(Event[ReadyFields]):
    """Group that waits for the trainer."""


class StaleEvent(Event[StaleFields]):
    """Groups that are too old to be trained; their prompts are sampled again."""


class ReturnedEvent(Event[ReturnedFields]):
    """Group that ended without training (`requeued`, `dropped`)."""


class AdmissionEvent(Event[AdmissionFields]):
    """Decision that a job runs, waits for workers or is paused."""


class DesiredEvent(Event[DesiredFields]):
    """Decision on the role of an instance."""


class ActualEvent(Event[ActualFields]):
    """State of an instance, as its worker reports it."""


class ProcessEndedEvent(Event[ProcessEndedFields]):
    """Unexpected end of a process."""


_TYPES: dict[str, type[Event[Any]]] = {
    "submitted": SubmittedEvent,
    "restored": SubmittedEvent,
    "phase": PhaseEvent,
    "changed": ChangedEvent,
    "evaluation": EvaluationEvent,
    "failure": FailureEvent,
    "initial": InitialEvent,
    "step": StepEvent,
    "lineage": LineageEvent,
    "opened": OpenedEvent,
    "ready": ReadyEvent,
    "stale": StaleEvent,
    "requeued": ReturnedEvent,
    "dropped": ReturnedEvent,
    "admission": AdmissionEvent,
    "desired": DesiredEvent,
    "actual": ActualEvent,
    "process_ended": ProcessEndedEvent,
}


def make_typed_event(event: Event) -> Event[Any]:
    """Return an event as the type of its kind."""
    return _TYPES.get(event.kind, Event)(event.id, event.ms, event.kind, event.fields)
