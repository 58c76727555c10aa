"""Choice of the expert split of an MoE job's core, or of uniform ranks.

A split has attention on one kind of accelerators and experts on another.

The division with the highest predicted throughput is tried, and measured over a window of steps.
Another division that is predicted or measured to be faster replaces it: the core leaves with a
checkpoint, and is placed again with other ranks. Measurements take precedence over predictions.
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

MIN_SPEEDUP = 1.05  # minimum speed-up for a change
WARMUP_STEPS = 2  # steps of a new core that are not measured
MAX_CHANGES = 4  # maximum number of changes of a job's core

EXPERT_SPLIT_RULE = "mixture"


@dataclass(frozen=True, slots=True)
class ExpertSplitState:
    """Expert split of one job. Rates are trained tokens per second; 0: not known."""

    wanted: ExpertSplit | None = None  # desired split; None: uniform ranks
    best: ExpertSplit | None = None  # split with the highest prediction
    kinds: tuple[str, ...] = ()  # its kinds: of attention, of experts
    predicted: float = 0.0  # with `best`
    alike: float = 0.0  # with uniform ranks
    profiled: bool = False  # True if the prediction uses measured profiles
    sampled: bool = False  # True if it uses sampled lengths
    observed: Mapping[tuple[int, ...], float] = field(
        default_factory=dict
    )  # by `ExpertSplit.to_list`
    window: tuple[str, MeasuredWork] | None = (
        None  # the process, and its work at the begin of the window
    )
    changes: int = 0
    why: str = ""
    begun: bool = False  # a core has run: repeated steps use the same split
    priced: str = ""  # inputs of the last prediction: `encode_prediction_inputs`

    def estimate_tokens_per_s(self, expert_split: ExpertSplit | None) -> float:
        """Return the measured or predicted rate of a split. If uniform ranks were measured slower
        than predicted, scale the predictions of splits down too. Do not scale up, so that a
        disappointing split is compared with the measured uniform ranks.
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
    """Return the job with the expert split of its core, and the state to remember."""
    if not job.need.divides:
        return job, None
    core = draft.get_instances(job.id).core
    if previous is None and core is None and draft.snapshot.is_gathering_workers:
        return job, None  # workers that still join may be of another kind
    found = _update_prediction(draft, job, previous or ExpertSplitState())
    if core is not None:
        found = _record_throughput(job, core, found)
        running = found.observed.get(
            _encode_split(core.instance.apart), 0.0
        )  # 0: measured for too short a time
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
    """Describe the split for users."""
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
    """Update the prediction when more is known: measured profiles of both kinds, or sampled
    lengths.
    """
    profiled = all(kind in job.measured.profiles for kind in previous.kinds)
    sampled = job.measured.lengths is not None
    less = previous.profiled > profiled or previous.sampled > sampled
    if previous.kinds and (less or (previous.profiled, previous.sampled) == (profiled, sampled)):
        return previous
    there = _count_kinds(draft, job)
    if previous.why and not previous.kinds and len(there) < 2:
        return previous  # unchanged
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
    """Count the accelerators of each kind that a core may have, in the place of the core or else
    the largest place.
    """
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
    """Return the state with the measured rate of a completed window of steps of the core."""
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
    """Return the state with the desired split, if the current one has been measured."""
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
    """Remove the core after its checkpoint if its split changes; return the state and the remaining
    core.
    """
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
