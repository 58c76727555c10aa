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

    desired_split: ExpertSplit | None = None  # desired split; None: uniform ranks
    predicted_split: ExpertSplit | None = None  # split with the highest prediction
    kinds: tuple[str, ...] = ()  # its kinds: of attention, of experts
    predicted_tokens_per_s: float = 0.0  # with `best`
    uniform_tokens_per_s: float = 0.0  # with uniform ranks
    is_measured: bool = False  # True if the prediction uses measured profiles
    has_sampled_lengths: bool = False  # True if it uses sampled lengths
    # by `ExpertSplit.to_list`
    observed_tokens_per_s: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    window: tuple[str, MeasuredWork] | None = (
        None  # the process, and its work at the begin of the window
    )
    change_count: int = 0
    reason: str = ""
    has_started: bool = False  # a core has run: repeated steps use the same split
    predicted_inputs: str = ""  # inputs of the last prediction: `encode_prediction_inputs`

    def estimate_tokens_per_s(self, expert_split: ExpertSplit | None) -> float:
        """Return the measured or predicted rate of a split. If uniform ranks were measured slower
        than predicted, scale the predictions of splits down too. Do not scale up, so that a
        disappointing split is compared with the measured uniform ranks.
        """
        if (key := _encode_split(expert_split)) in self.observed_tokens_per_s:
            return self.observed_tokens_per_s[key]
        if expert_split is None:
            return self.uniform_tokens_per_s
        off = (
            self.observed_tokens_per_s[()] / self.uniform_tokens_per_s
            if self.uniform_tokens_per_s and () in self.observed_tokens_per_s
            else 1.0
        )
        return (
            self.predicted_tokens_per_s * min(off, 1.0)
            if expert_split == self.predicted_split
            else 0.0
        )


def choose_expert_split(
    draft: PoolDraft, job: PlannedJob, previous: ExpertSplitState | None
) -> tuple[PlannedJob, ExpertSplitState | None]:
    """Return the job with the expert split of its core, and the state to remember."""
    if not job.requirements.auto_expert_split:
        return job, None
    core = draft.get_instances(job.id).core
    if previous is None and core is None and draft.snapshot.is_gathering_workers:
        return job, None  # workers that still join may be of another kind
    found = _update_prediction(draft, job, previous or ExpertSplitState())
    if core is not None:
        found = _record_throughput(job, core, found)
        # 0: measured for too short a time
        running = found.observed_tokens_per_s.get(_encode_split(core.instance.expert_split), 0.0)
        found = _choose_split(found, core.instance.expert_split, bool(running))
        found, core = _apply_split(draft, job, core, replace(found, has_started=True))
    elif not found.has_started:
        found = _choose_split(found, None, True)
    apart = core.instance.expert_split if core is not None else found.desired_split
    attention = apart.attention_ranks if apart is not None else 0
    kinds = found.kinds if apart is not None else found.kinds[:1]  # if there are enough of that
    need = replace(
        job.requirements, attention_ranks=attention, expert_split=apart, expert_split_kinds=kinds
    )
    draft.requirements_by_job[job.id] = need
    return replace(job, requirements=need), found


def describe_expert_split(state: ExpertSplitState) -> str:
    """Describe the split for users."""
    if not state.kinds:
        return f"its ranks are uniform: {state.reason}"
    fast, slow = state.kinds
    by = "from measurements" if state.is_measured else "from declared figures"
    best = state.predicted_split
    assert best is not None
    parts = [
        f"attention on {best.attention_ranks} ranks of {fast} and experts on {slow}, "
        f"{best.micro_batches} micro-batches: {state.predicted_tokens_per_s:,.0f} tokens a second "
        f"predicted ({by}), "
        + (
            f"{state.uniform_tokens_per_s:,.0f} with uniform ranks"
            if state.uniform_tokens_per_s
            else "uniform ranks do not fit"
        )
    ]
    for key, rate in state.observed_tokens_per_s.items():
        what = f"{key[0]} with attention and {key[1]} micro-batches" if key else "uniform ranks"
        parts.append(f"{what}: {rate:,.0f} observed")
    now = (
        "uniform"
        if state.desired_split is None
        else f"{state.desired_split.attention_ranks} with attention"
    )
    return "; ".join(
        [*parts, f"its ranks are {now}" + (f": {state.reason}" if state.reason else "")]
    )


def _update_prediction(
    draft: PoolDraft, job: PlannedJob, previous: ExpertSplitState
) -> ExpertSplitState:
    """Update the prediction when more is known: measured profiles of both kinds, or sampled
    lengths.
    """
    profiled = all(kind in job.measurements.profiles for kind in previous.kinds)
    sampled = job.measurements.lengths is not None
    less = previous.is_measured > profiled or previous.has_sampled_lengths > sampled
    if previous.kinds and (
        less or (previous.is_measured, previous.has_sampled_lengths) == (profiled, sampled)
    ):
        return previous
    kind_counts = _count_kinds(draft, job)
    if previous.reason and not previous.kinds and len(kind_counts) < 2:
        return previous  # unchanged
    inputs = encode_prediction_inputs(job, kind_counts)
    if inputs == previous.predicted_inputs:
        return previous
    found = predict_expert_split(job, kind_counts)
    if not isinstance(found, ExpertSplitPrediction):
        return replace(
            previous, predicted_inputs=inputs, reason=previous.reason if previous.kinds else found
        )
    return replace(
        previous,
        predicted_split=found.expert_split,
        kinds=found.kinds,
        predicted_tokens_per_s=found.tokens_per_s,
        uniform_tokens_per_s=found.uniform_tokens_per_s,
        is_measured=found.is_measured,
        has_sampled_lengths=sampled,
        reason="",
        predicted_inputs=inputs,
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
    core_place_workers = [
        worker for worker in draft.placeable_workers if draft.get_place(worker) == home
    ]
    names = (draft.workers[worker].accelerator for worker in core_place_workers)
    return dict(Counter(match_kind(name) or name for name in names))


def _record_throughput(
    job: PlannedJob, core: InstancePlacement, state: ExpertSplitState
) -> ExpertSplitState:
    """Return the state with the measured rate of a completed window of steps of the core."""
    live = {
        name: work
        for name, work in job.measurements.work_by_process.items()
        if work.steps >= WARMUP_STEPS
    }
    if not (core.is_awake and core.instance.is_reconciled) or len(live) != 1:
        return state
    [(process, work)] = live.items()
    if state.window is None or state.window[0] != process:
        return replace(state, window=(process, work))
    done = work - state.window[1]
    busy_s = done.busy_s - done.held_s
    if done.steps < job.config.window_steps or busy_s <= 0:
        return state
    observed = {
        **state.observed_tokens_per_s,
        _encode_split(core.instance.expert_split): done.tokens / busy_s,
    }
    return replace(state, window=(process, work), observed_tokens_per_s=observed)


def _choose_split(
    state: ExpertSplitState, current_split: ExpertSplit | None, is_judged: bool
) -> ExpertSplitState:
    """Return the state with the desired split, if the current one has been measured."""
    if not is_judged or state.change_count >= MAX_CHANGES or not state.kinds:
        return state
    others = [ExpertSplit.from_list(key or None) for key in state.observed_tokens_per_s] + [
        None,
        state.predicted_split,
    ]
    best = max(others, key=state.estimate_tokens_per_s)
    if best != current_split and state.estimate_tokens_per_s(
        best
    ) >= MIN_SPEEDUP * state.estimate_tokens_per_s(current_split):
        return replace(state, desired_split=best)
    return replace(state, desired_split=current_split)


def _apply_split(
    draft: PoolDraft, job: PlannedJob, core: InstancePlacement, state: ExpertSplitState
) -> tuple[ExpertSplitState, InstancePlacement | None]:
    """Remove the core after its checkpoint if its split changes; return the state and the remaining
    core.
    """
    figures = {
        "predicted": round(state.predicted_tokens_per_s, 1),
        "alike": round(state.uniform_tokens_per_s, 1),
        "profiled": state.is_measured,
        "attention": state.desired_split.attention_ranks if state.desired_split is not None else 0,
    }
    why = Rationale(EXPERT_SPLIT_RULE, job.id, figures)
    if core.instance.tier == Tier.ABSENT:
        if core.instance.is_reconciled:
            draft.remove_instance(core, why)
            return state, None
        since_ms = draft.snapshot.now_ms - core.instance.desired_since_ms
        if since_ms > 1000 * draft.snapshot.settings.move_timeout_s:
            core = draft.update_instance(core, why, tier=Tier.ACCELERATOR)
            reason = "its state could not be saved as a checkpoint"
            return replace(
                state,
                desired_split=core.instance.expert_split,
                change_count=MAX_CHANGES,
                reason=reason,
            ), core
        return state, core
    able = (
        core.is_awake
        and core.instance.is_reconciled
        and job.has_checkpoint
        and not job.block_reason
    )
    if state.desired_split == core.instance.expert_split or not able:
        return state, core
    for engine in draft.get_instances(job.id).time_sliced_engines:
        draft.remove_instance(engine, why)
    core = draft.update_instance(core, why, tier=Tier.ABSENT, time_sliced=False)
    return replace(state, change_count=state.change_count + 1, window=None), core


def _encode_split(expert_split: ExpertSplit | None) -> tuple[int, ...]:
    return tuple(expert_split.to_list()) if expert_split is not None else ()
