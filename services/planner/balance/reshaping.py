"""Chooses the degrees of a job's engines by the lengths of its trajectories, where its file allows
several, and brings them there over as many looks as it takes.

What a step waits for are its longest trajectories, token after token: an engine of several workers
has them sooner done, while as many workers one by one do more of the short ones. The allocation of
`layouts/` weighs the two; what it says of the gangs that are there is set to what was measured of
them, and what it says of others is judged afterwards like any move (`trials.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from meshrl.common.state.pool.demand.measured import LEVELS, Lengths, kind_of
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Place, Why
from meshrl.services.planner.balance import shapes
from meshrl.services.planner.balance.shapes import RolloutShape, ShapeRoom
from meshrl.services.planner.balance.standing import Pressed, explained, refused, terms_of
from meshrl.services.planner.balance.trials import RESHAPED
from meshrl.services.planner.balance.watch import ShapeWish, SplitWatch
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.forecast import degrees
from meshrl.services.planner.forecast.accounts import StepMark
from meshrl.services.planner.forecast.quantities import Split, StepTerms
from meshrl.services.planner.layouts.nodes import BLOCK, LayoutNode
from meshrl.services.planner.layouts.serving import GangServer, Served
from meshrl.services.planner.policies.engines import shape
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated, Team

RULE = "lengths"
LATE = 3  # times as long as a move may take, after which a shape is given up
STAYS = 0.8  # share of a long trajectory that an engine of the smallest degree may be left with
LONG = 0.985  # share of trajectories that are shorter than one that holds a step up
TIE = 0.99  # of the present step's time that another shape takes at most which is thought of


def reshape(
    draft: Draft,
    job: PlannedJob,
    watch: SplitWatch,
    mark: StepMark,
    found: Pressed,
    correction: Correction,
) -> SplitWatch:
    """Wishes for other degrees and helpers where that is predicted to pay."""
    team, split, lengths = draft.team(job.id), watch.split, job.measured.lengths
    assert split is not None
    if lengths is None:
        return explained(watch, found.model, "no lengths are known yet", found.window)
    ranges = _ranges(draft, job, watch, lengths, found, correction)
    room = _room(draft, job, team)
    here = shapes.present(ranges, room) if ranges.servers else None
    if here is None or not math.isfinite(here.rollout_s) or here.rollout_s <= 0:
        why = "how fast its engines generate is not known yet"
        return explained(watch, found.model, why, found.window)
    best, after_s = _best(job, watch, found, ranges, room, here, lengths)
    if best == here:
        why = "no other degrees are predicted to be faster"
        return explained(watch, found.model, why, found.window)
    after = _after(split, best, here, job.need.ranks)
    moved = _changed(split, after)
    towards = RESHAPED if after.degrees != split.degrees else "training"
    if why := refused(job, watch, team, found, after_s, towards, moved):
        return explained(watch, found.model, f"{after.named}: {why}", found.window)
    figures = found.figures(job, after, after_s) | {"was": split.named}
    watch, arrived = _wished(draft, job, watch, RULE, best.degrees, best.helpers, figures)
    trial = found.trial(job, watch, RULE, arrived, after, after_s, moved)
    trial = replace(trial, bias=watch.bias.get(towards, 1.0))
    told = f"{moved} workers become {after.named}"
    return explained(watch.moved(mark.step, trial), found.model, told, found.window)


def back(
    draft: Draft, job: PlannedJob, watch: SplitWatch, to: Split, rule: str, figures: dict[str, Any]
) -> SplitWatch:
    """Wishes for the degrees and helpers that a job had before."""
    watch, _ = _wished(draft, job, watch, rule, to.degrees, to.trainers - job.need.ranks, figures)
    return watch


def pursue(draft: Draft, job: PlannedJob, watch: SplitWatch, step: int) -> SplitWatch:
    """The watch after another look at a wish, which is fulfilled as far as can be at once."""
    wish = watch.wish
    assert wish is not None
    if draft.snapshot.now_ms > wish.until_ms:
        failures = dict(watch.failures)
        failures[RESHAPED] = failures.get(RESHAPED, 0) + 1
        watch = replace(watch, wish=None, trial=None, failures=failures, moved_step=step)
        return explained(watch, None, f"{list(wish.degrees)} could not be had in time")
    why = Why(wish.rule, job.id, dict(wish.figures))
    done = shape(
        draft, job, wish.degrees, helpers=wish.helpers, why=why, details=dict(wish.figures)
    )
    return replace(watch, wish=None) if done else watch


def _wished(
    draft: Draft,
    job: PlannedJob,
    watch: SplitWatch,
    rule: str,
    wanted: tuple[int, ...],
    helpers: int,
    figures: dict[str, Any],
) -> tuple[SplitWatch, str]:
    """The watch with a new wish, and the first resident that arrived for it."""
    late_ms = round(1000 * LATE * draft.snapshot.settings.move_s)
    wish = ShapeWish(rule, wanted, helpers, draft.snapshot.now_ms + late_ms, figures)
    before = len(draft.decisions)
    watch = pursue(draft, job, replace(watch, wish=wish), 0)
    moves = (d for d in draft.decisions[before:] if isinstance(d, Place) and d.move is not None)
    arrived = next((one.resident.id for one in moves), "")
    return watch, arrived


# -- which shape -----------------------------------------------------------------------------------


def _best(
    job: PlannedJob,
    watch: SplitWatch,
    found: Pressed,
    ranges: Served,
    room: ShapeRoom,
    here: RolloutShape,
    lengths: Lengths,
) -> tuple[RolloutShape, float]:
    """The shape with the shortest step, and its seconds; the present one unless another is shorter
    by more than a tie. Of several as good, the one that changes least.
    """
    terms, split = terms_of(job), watch.split
    assert split is not None
    # By the model of layouts the present gangs take another time than was measured of them: what
    # training takes is set in proportion, so that both are weighed as they are.
    scale = here.rollout_s / max(found.model.rollout_s, 1e-9)
    fixed_s, work_s = found.rates.fixed_s, found.rates.work_s

    def train_s(helpers: int) -> float:
        return scale * (fixed_s + work_s / (job.need.ranks + helpers))

    best, best_s = here, found.stays_s
    for other in shapes.others(ranges, room, train_s):
        if other.degrees == here.degrees and other.helpers == here.helpers:
            continue
        if not 0 < other.rollout_s < math.inf:
            continue
        towards = RESHAPED if other.degrees != here.degrees else "training"
        after = _after(split, other, here, job.need.ranks)
        after_s = found.after_s(after, terms) * watch.bias.get(towards, 1.0)
        after_s = max(after_s, _straggler_s(found, ranges, other, lengths, terms))
        if after_s < TIE * best_s:
            best, best_s = other, after_s
    return best, best_s


def _straggler_s(
    found: Pressed, ranges: Served, shape: RolloutShape, lengths: Lengths, terms: StepTerms
) -> float:
    """What a step takes at least where engines have several degrees: all trajectories begin with
    those of the smallest, and nobody knows which are long. One that stays there for most of its
    tokens (`STAYS`) holds a step up that as many as may pass it over have left behind. 0 where all
    engines have one degree.
    """
    if len(set(shape.degrees)) == 1:
        return 0.0
    longest = float(np.interp(LONG, LEVELS, lengths.sampled))
    at_engines = found.window.work.engine_s / max(found.window.seconds, 1e-9)
    batch = min(float(terms.slots), max(1.0, at_engines / len(shape.degrees)))
    context = lengths.prompt + longest / 2
    small_s, large_s = (
        max(one.curve.step_s(batch, context) for one in ranges.servers if one.degree == degree)
        for degree in (min(shape.degrees), max(shape.degrees))
    )
    token_s = STAYS * small_s + (1 - STAYS) * large_s
    return longest * token_s / (terms.max_staleness + 1)


def _after(split: Split, other: RolloutShape, here: RolloutShape, ranks: int) -> Split:
    speed = here.rollout_s / other.rollout_s
    width = min(1.0, other.tokens_per_s / here.tokens_per_s / speed)
    return Split(split.engines, ranks + other.helpers, other.degrees, speed, width)


def _changed(before: Split, after: Split) -> int:
    gone, come = Counter(before.degrees), Counter(after.degrees)
    leave = sum(degree * n for degree, n in (gone - come).items())
    arrive = sum(degree * n for degree, n in (come - gone).items())
    return max(leave, arrive, abs(after.trainers - before.trainers))


def _ranges(
    draft: Draft,
    job: PlannedJob,
    watch: SplitWatch,
    lengths: Lengths,
    found: Pressed,
    correction: Correction,
) -> Served:
    """A step's trajectories by length, as engines of every degree and kind would serve them."""
    team = draft.team(job.id)
    kinds = sorted({_kind(draft, one) for one in (*team.engines, *team.helpers)})
    servers = [
        GangServer(curve, degrees.capacity((kind, degree), job), job.slots)
        for kind in kinds
        for degree in job.need.degrees
        if degree <= BLOCK and not degree & (degree - 1)
        if (curve := degrees.curve((kind, degree), watch.curves, job, correction))
    ]
    now = found.demand
    groups = shapes.groups_of(lengths, now.trajectories, now.tool_s, team.workers)
    return Served(servers, groups)


def _room(draft: Draft, job: PlannedJob, team: Team) -> ShapeRoom:
    """The workers of a job's engines and helpers, by host and kind of accelerators."""
    engines = [one for one in team.engines if not one.resident.pinned]
    helpers = [one for one in team.helpers if not one.resident.pinned]
    free: Counter[tuple[str, str]] = Counter()
    for seated in (*engines, *helpers):
        for worker in seated.workers:
            about = draft.workers[worker]
            free[kind_of(about.accelerator), about.host] += 1
    nodes = tuple(LayoutNode(kind, f"{host} {kind}", n) for (kind, host), n in sorted(free.items()))
    pinned = [one for one in team.engines if one.resident.pinned]
    return ShapeRoom(
        nodes,
        tuple((_kind(draft, one), len(one.workers)) for one in engines),
        len(helpers),
        tuple((_kind(draft, one), len(one.workers)) for one in pinned),
        len(team.helpers) - len(helpers),
        job.need.helped,
        job.need.smallest,
        job.config.min_rollout,
    )


def _kind(draft: Draft, seated: Seated) -> str:
    return kind_of(draft.workers[seated.workers[0]].accelerator)
