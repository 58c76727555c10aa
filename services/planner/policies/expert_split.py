"""Whether the ranks of a core that trains a mixture are set apart, attention on one kind of
accelerators and experts on another, and how.

What is predicted to train most is tried, and measured over a window of steps; where something else
is predicted, or was measured, to be faster, that takes its place: a core leaves as a checkpoint,
and comes again as other ranks. What has been measured counts for more than what is predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshrl.common.hardware.accelerators import match_kind
from meshrl.common.state.pool.demand.measurements import MeasuredWork
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale
from meshrl.common.state.pool.workers.rows import ExpertSplit, Tier
from meshrl.services.planner.costs.expert_split_prediction import (
    ExpertSplitPrediction,
    encode_prediction_inputs,
    predict_expert_split,
)
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement

MIN_SPEEDUP = 1.05  # times as fast as what is there, from which something else takes its place
WARMUP_STEPS = 2  # steps of a core that are not counted: it warms up
MAX_CHANGES = 4  # times that a job's core is divided anew

EXPERT_SPLIT_RULE = "mixture"


@dataclass(frozen=True, slots=True)
class ExpertSplitState:
    """What is remembered of one job. Tokens a second that are trained; 0: not known."""

    wanted: ExpertSplit | None = None  # how its ranks are to be; None: all alike
    best: ExpertSplit | None = None  # the division that is predicted to be the fastest
    kinds: tuple[str, ...] = ()  # for which: of attention, of experts
    predicted: float = 0.0  # with it
    alike: float = 0.0  # predicted with ranks all alike
    profiled: bool = False  # whether by what ranks have measured,
    sampled: bool = False  # and of lengths that were sampled
    observed: Mapping[tuple[int, ...], float] = field(
        default_factory=dict
    )  # by `ExpertSplit.to_list`
    window: tuple[str, MeasuredWork] | None = None  # the process and what it had done when it began
    changes: int = 0
    why: str = ""
    begun: bool = False  # there has been a core: whoever repeats its steps divides as it did
    priced: str = ""  # the inputs that divisions were priced for last: see `inputs_of`

    def estimate_tokens_per_s(self, expert_split: ExpertSplit | None) -> float:
        """What is known of a division, or foretold. Where ranks all alike were measured to train
        less than was foretold of them, others are taken to do so, too; not the other way round, so
        that ranks apart are compared with what ranks all alike do in truth, if they disappoint.
        """
        if (key := _encode_split(expert_split)) in self.observed:
            return self.observed[key]
        if expert_split is None:
            return self.alike
        off = self.observed[()] / self.alike if self.alike and () in self.observed else 1.0
        return self.predicted * min(off, 1.0) if expert_split == self.best else 0.0


def choose_expert_split(
    draft: PoolDraft, job: PlannedJob, previous: ExpertSplitState | None
) -> tuple[PlannedJob, ExpertSplitState | None]:
    """The job with how the ranks of its core are set apart, and what is to be remembered of it."""
    if not job.need.divides:
        return job, None
    core = draft.get_instances(job.id).core
    if previous is None and core is None and draft.snapshot.is_gathering_workers:
        return job, None  # who is still to come may be of another kind
    found = _update_prediction(draft, job, previous or ExpertSplitState())
    if core is not None:
        found = _record_throughput(job, core, found)
        running = found.observed.get(
            _encode_split(core.instance.apart), 0.0
        )  # 0: for too short a time
        found = _choose_split(found, core.instance.apart, bool(running))
        found, core = _apply_split(draft, job, core, replace(found, begun=True))
    elif not found.begun:
        found = _choose_split(found, None, True)
    apart = core.instance.apart if core is not None else found.wanted
    attention = apart.attention if apart is not None else 0
    kinds = found.kinds if apart is not None else found.kinds[:1]  # if there are enough of that
    need = replace(job.need, attention=attention, apart=apart, kinds=kinds)
    draft.requirements_by_job[job.id] = need
    return replace(job, need=need), found


def describe_expert_split(state: ExpertSplitState) -> str:
    """What people are told of it."""
    if not state.kinds:
        return f"its ranks are all alike: {state.why}"
    fast, slow = state.kinds
    by = "as ranks have measured" if state.profiled else "as declared"
    best = state.best
    assert best is not None
    parts = [
        f"attention on {best.attention} ranks of {fast} and experts on {slow}, {best.micro_batches}"
        f" micro-batches: {state.predicted:,.0f} tokens a second predicted ({by}), "
        + (f"{state.alike:,.0f} with ranks all alike" if state.alike else "alike do not fit")
    ]
    for key, rate in state.observed.items():
        what = f"{key[0]} with attention and {key[1]} micro-batches" if key else "ranks all alike"
        parts.append(f"{what}: {rate:,.0f} observed")
    now = "all alike" if state.wanted is None else f"{state.wanted.attention} with attention"
    return "; ".join([*parts, f"its ranks are {now}" + (f": {state.why}" if state.why else "")])


def _update_prediction(
    draft: PoolDraft, job: PlannedJob, previous: ExpertSplitState
) -> ExpertSplitState:
    """What is predicted, once, and again when more is known: once ranks of both kinds have measured
    themselves, and once lengths are sampled.
    """
    profiled = all(kind in job.measured.profiles for kind in previous.kinds)
    sampled = job.measured.lengths is not None
    less = previous.profiled > profiled or previous.sampled > sampled
    if previous.kinds and (less or (previous.profiled, previous.sampled) == (profiled, sampled)):
        return previous
    there = _count_kinds(draft, job)
    if previous.why and not previous.kinds and len(there) < 2:
        return previous  # as it was
    inputs = encode_prediction_inputs(job, there)
    if inputs == previous.priced:
        return previous
    found = predict_expert_split(job, there)
    if not isinstance(found, ExpertSplitPrediction):
        return replace(previous, priced=inputs, why=previous.why if previous.kinds else found)
    return replace(
        previous,
        best=found.expert_split,
        kinds=found.kinds,
        predicted=found.tokens_per_s,
        alike=found.uniform_tokens_per_s,
        profiled=found.is_measured,
        sampled=sampled,
        why="",
        priced=inputs,
    )


def _count_kinds(draft: PoolDraft, job: PlannedJob) -> dict[str, int]:
    """How many accelerators of each kind a core may have: of the place that has most."""
    core = draft.get_instances(job.id).core
    places = Counter(draft.get_place(worker) for worker in draft.placeable_workers)
    if not places:
        return {}
    home = draft.get_place(core.workers[0]) if core is not None else places.most_common(1)[0][0]
    there = [worker for worker in draft.placeable_workers if draft.get_place(worker) == home]
    names = (draft.workers[worker].accelerator for worker in there)
    return dict(Counter(match_kind(name) or name for name in names))


def _record_throughput(
    job: PlannedJob, core: InstancePlacement, state: ExpertSplitState
) -> ExpertSplitState:
    """With what a window of steps of the core has shown."""
    live = {name: work for name, work in job.measured.work.items() if work.steps >= WARMUP_STEPS}
    if not (core.is_awake and core.instance.is_reconciled) or len(live) != 1:
        return state
    [(process, work)] = live.items()
    if state.window is None or state.window[0] != process:
        return replace(state, window=(process, work))
    done = work - state.window[1]
    busy_s = done.busy_s - done.held_s
    if done.steps < job.config.window_steps or busy_s <= 0:
        return state
    observed = {**state.observed, _encode_split(core.instance.apart): done.tokens / busy_s}
    return replace(state, window=(process, work), observed=observed)


def _choose_split(
    state: ExpertSplitState, current_split: ExpertSplit | None, is_judged: bool
) -> ExpertSplitState:
    """With the division that is wanted, where the one of now is to be judged."""
    if not is_judged or state.changes >= MAX_CHANGES or not state.kinds:
        return state
    others = [ExpertSplit.from_list(key or None) for key in state.observed] + [None, state.best]
    best = max(others, key=state.estimate_tokens_per_s)
    if best != current_split and state.estimate_tokens_per_s(
        best
    ) >= MIN_SPEEDUP * state.estimate_tokens_per_s(current_split):
        return replace(state, wanted=best)
    return replace(state, wanted=current_split)


def _apply_split(
    draft: PoolDraft, job: PlannedJob, core: InstancePlacement, state: ExpertSplitState
) -> tuple[ExpertSplitState, InstancePlacement | None]:
    """The core leaves, as a checkpoint, when its ranks are to be others."""
    figures = {
        "predicted": round(state.predicted, 1),
        "alike": round(state.alike, 1),
        "profiled": state.profiled,
        "attention": state.wanted.attention if state.wanted is not None else 0,
    }
    why = Rationale(EXPERT_SPLIT_RULE, job.id, figures)
    if core.instance.tier == Tier.ABSENT:
        if core.instance.is_reconciled:
            draft.remove_instance(core, why)
            return state, None
        since_ms = draft.snapshot.now_ms - core.instance.changed_ms
        if since_ms > 1000 * draft.snapshot.settings.move_s:
            core = draft.update_instance(core, why, tier=Tier.ACCELERATOR)
            told = "it could not be left as a checkpoint"
            return replace(state, wanted=core.instance.apart, changes=MAX_CHANGES, why=told), core
        return state, core
    able = core.is_awake and core.instance.is_reconciled and job.checkpointed and not job.held
    if state.wanted == core.instance.apart or not able:
        return state, core
    for engine in draft.get_instances(job.id).time_sliced_engines:
        draft.remove_instance(engine, why)
    core = draft.update_instance(core, why, tier=Tier.ABSENT, turns=False)
    return replace(state, changes=state.changes + 1, window=None), core


def _encode_split(expert_split: ExpertSplit | None) -> tuple[int, ...]:
    return tuple(expert_split.to_list()) if expert_split is not None else ()
