"""The first plan of a job: made when its first groups have come, before a step was measured.

Engines and shards have measured their part by then. What training takes is foretold
(`costs/foretold.py`), so that a job whose default split is far off does not have to make steps with
it until they are enough to tell. Whether it paid is judged by what is measured afterwards.
"""

from __future__ import annotations

from dataclasses import replace

from meshrl.common.state.pool.demand.measured import kind_of
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.store.explained import OPENING
from meshrl.services.planner.balance.standing import Pressed, curves_of, host_cores, terms_of
from meshrl.services.planner.balance.watch import SplitWatch
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.foretold import TrainingQuery, believed
from meshrl.services.planner.forecast.accounts import StepMark, Window
from meshrl.services.planner.forecast.prediction import mean, predicted
from meshrl.services.planner.forecast.quantities import Demand, StepRates
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Team

ENDED = 2 / 3  # of those trajectories


def opens(job: PlannedJob, watch: SplitWatch, mark: StepMark) -> bool:
    """Whether it is time for a job's first plan: neither too early nor too late, as something was
    measured.
    """
    if watch.split is None or watch.trial is not None or watch.moved_step is not None:
        return False
    if watch.window(mark, 1) is not None or mark.total.sampled <= 0:
        return False
    # Of those that the gate admits before a step is trained the short ones end first: so many that
    # the long ones are among them.
    terms, work = terms_of(job), mark.total
    admits = (1 + terms.max_staleness) * terms.groups * terms.group_size
    return work.trajectories >= ENDED * admits and work.groups >= terms.groups


def opened(
    draft: Draft, job: PlannedJob, watch: SplitWatch, mark: StepMark, correction: Correction
) -> Pressed | None:
    """What a job's first plan is made by; None where nothing foretells its training, or no engine
    has measured its curve.
    """
    terms, work, split = terms_of(job), mark.total, watch.split
    assert split is not None
    team, lengths = draft.team(job.id), job.measured.lengths
    curves = [one for one in curves_of(job, watch) if one.steps > 0]
    asked = asked_of(draft, job, team)
    if lengths is None or not curves or asked is None or not split.engines:
        return None
    trajectories = float(terms.groups * terms.group_size)
    sampled = work.sampled / work.trajectories
    now = Demand(
        trajectories=trajectories,
        sampled=sampled,
        tool_s=work.tool_s / work.trajectories,
        trained=trajectories * (work.prompted / work.trajectories + sampled),
        shape=lengths.sampled,
    )
    training = believed(asked, trajectories, now.trained, correction)
    if training is None:
        return None
    rates = StepRates(
        curve=mean(curves, sampled / 2),
        friction=1.0,
        work_s=training.work_s,
        fixed_s=training.fixed_s,
        cores=0.0,
    )
    model = predicted(now, rates, split, terms, 0.0)
    rates = replace(rates, cores=host_cores(draft, team))
    model = predicted(now, rates, split, terms, model.step_s)
    return Pressed(Window(0, 0.0, work), 0.0, now, rates, model, OPENING)


def asked_of(draft: Draft, job: PlannedJob, team: Team) -> TrainingQuery | None:
    """What of a job's training is foretold; None without a core."""
    if team.core is None:
        return None
    accelerator = draft.workers[team.core.workers[0]].accelerator
    return TrainingQuery(job.model, kind_of(accelerator), job.shape, job.training_pace)
