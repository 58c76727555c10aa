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

from meshrl.common.hardware.profiles import kind_of
from meshrl.common.state.pool.demand.measured import MeasuredWork
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Why
from meshrl.common.state.pool.workers.rows import Apart, Tier
from meshrl.services.planner.costs.mixtures import Foretold, foretold, inputs_of
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated

PAYS = 1.05  # times as fast as what is there, from which something else takes its place
FIRST = 2  # steps of a core that are not counted: it warms up
MOST = 4  # times that a job's core is divided anew

RULE = "mixture"


@dataclass(frozen=True, slots=True)
class Mixture:
    """What is remembered of one job. Tokens a second that are trained; 0: not known."""

    wanted: Apart | None = None  # how its ranks are to be; None: all alike
    best: Apart | None = None  # the division that is predicted to be the fastest
    kinds: tuple[str, ...] = ()  # for which: of attention, of experts
    predicted: float = 0.0  # with it
    alike: float = 0.0  # predicted with ranks all alike
    profiled: bool = False  # whether by what ranks have measured,
    sampled: bool = False  # and of lengths that were sampled
    observed: Mapping[tuple[int, ...], float] = field(default_factory=dict)  # by `Apart.told`
    window: tuple[str, MeasuredWork] | None = None  # the process and what it had done when it began
    changes: int = 0
    why: str = ""
    begun: bool = False  # there has been a core: whoever repeats its steps divides as it did
    priced: str = ""  # the inputs that divisions were priced for last: see `inputs_of`

    def score(self, apart: Apart | None) -> float:
        """What is known of a division, or foretold. Where ranks all alike were measured to train
        less than was foretold of them, others are taken to do so, too; not the other way round, so
        that ranks apart are compared with what ranks all alike do in truth, if they disappoint.
        """
        if (key := _key(apart)) in self.observed:
            return self.observed[key]
        if apart is None:
            return self.alike
        off = self.observed[()] / self.alike if self.alike and () in self.observed else 1.0
        return self.predicted * min(off, 1.0) if apart == self.best else 0.0


def divided(
    draft: Draft, job: PlannedJob, known: Mixture | None
) -> tuple[PlannedJob, Mixture | None]:
    """The job with how the ranks of its core are set apart, and what is to be remembered of it."""
    if not job.need.divides:
        return job, None
    core = draft.team(job.id).core
    if known is None and core is None and draft.snapshot.gathers:
        return job, None  # who is still to come may be of another kind
    found = _foretold(draft, job, known or Mixture())
    if core is not None:
        found = _measured(job, core, found)
        running = found.observed.get(_key(core.resident.apart), 0.0)  # 0: for too short a time
        found = _chosen(found, core.resident.apart, bool(running))
        found, core = _changed(draft, job, core, replace(found, begun=True))
    elif not found.begun:
        found = _chosen(found, None, True)
    apart = core.resident.apart if core is not None else found.wanted
    attention = apart.attention if apart is not None else 0
    kinds = found.kinds if apart is not None else found.kinds[:1]  # if there are enough of that
    need = replace(job.need, attention=attention, apart=apart, kinds=kinds)
    draft.needs[job.id] = need
    return replace(job, need=need), found


def told(mixture: Mixture) -> str:
    """What people are told of it."""
    if not mixture.kinds:
        return f"its ranks are all alike: {mixture.why}"
    fast, slow = mixture.kinds
    by = "as ranks have measured" if mixture.profiled else "as declared"
    best = mixture.best
    assert best is not None
    parts = [
        f"attention on {best.attention} ranks of {fast} and experts on {slow}, {best.micro_batches}"
        f" micro-batches: {mixture.predicted:,.0f} tokens a second predicted ({by}), "
        + (f"{mixture.alike:,.0f} with ranks all alike" if mixture.alike else "alike do not fit")
    ]
    for key, rate in mixture.observed.items():
        what = f"{key[0]} with attention and {key[1]} micro-batches" if key else "ranks all alike"
        parts.append(f"{what}: {rate:,.0f} observed")
    now = "all alike" if mixture.wanted is None else f"{mixture.wanted.attention} with attention"
    return "; ".join([*parts, f"its ranks are {now}" + (f": {mixture.why}" if mixture.why else "")])


def _foretold(draft: Draft, job: PlannedJob, known: Mixture) -> Mixture:
    """What is predicted, once, and again when more is known: once ranks of both kinds have measured
    themselves, and once lengths are sampled.
    """
    profiled = all(kind in job.measured.profiles for kind in known.kinds)
    sampled = job.measured.lengths is not None
    less = known.profiled > profiled or known.sampled > sampled
    if known.kinds and (less or (known.profiled, known.sampled) == (profiled, sampled)):
        return known
    there = _kinds(draft, job)
    if known.why and not known.kinds and len(there) < 2:
        return known  # as it was
    inputs = inputs_of(job, there)
    if inputs == known.priced:
        return known
    found = foretold(job, there)
    if not isinstance(found, Foretold):
        return replace(known, priced=inputs, why=known.why if known.kinds else found)
    return replace(
        known,
        best=found.apart,
        kinds=found.kinds,
        predicted=found.tokens_per_s,
        alike=found.alike,
        profiled=found.profiled,
        sampled=sampled,
        why="",
        priced=inputs,
    )


def _kinds(draft: Draft, job: PlannedJob) -> dict[str, int]:
    """How many accelerators of each kind a core may have: of the place that has most."""
    core = draft.team(job.id).core
    places = Counter(draft.place(worker) for worker in draft.placeable)
    if not places:
        return {}
    home = draft.place(core.workers[0]) if core is not None else places.most_common(1)[0][0]
    there = [worker for worker in draft.placeable if draft.place(worker) == home]
    names = (draft.workers[worker].accelerator for worker in there)
    return dict(Counter(kind_of(name) or name for name in names))


def _measured(job: PlannedJob, core: Seated, found: Mixture) -> Mixture:
    """With what a window of steps of the core has shown."""
    live = {name: work for name, work in job.measured.work.items() if work.steps >= FIRST}
    if not (core.awake and core.resident.settled) or len(live) != 1:
        return found
    [(process, work)] = live.items()
    if found.window is None or found.window[0] != process:
        return replace(found, window=(process, work))
    done = work - found.window[1]
    busy_s = done.busy_s - done.held_s
    if done.steps < job.config.window_steps or busy_s <= 0:
        return found
    observed = {**found.observed, _key(core.resident.apart): done.tokens / busy_s}
    return replace(found, window=(process, work), observed=observed)


def _chosen(found: Mixture, now: Apart | None, judged: bool) -> Mixture:
    """With the division that is wanted, where the one of now is to be judged."""
    if not judged or found.changes >= MOST or not found.kinds:
        return found
    others = [Apart.of(key or None) for key in found.observed] + [None, found.best]
    best = max(others, key=found.score)
    if best != now and found.score(best) >= PAYS * found.score(now):
        return replace(found, wanted=best)
    return replace(found, wanted=now)


def _changed(
    draft: Draft, job: PlannedJob, core: Seated, found: Mixture
) -> tuple[Mixture, Seated | None]:
    """The core leaves, as a checkpoint, when its ranks are to be others."""
    figures = {
        "predicted": round(found.predicted, 1),
        "alike": round(found.alike, 1),
        "profiled": found.profiled,
        "attention": found.wanted.attention if found.wanted is not None else 0,
    }
    why = Why(RULE, job.id, figures)
    if core.resident.tier == Tier.ABSENT:
        if core.resident.settled:
            draft.remove(core, why)
            return found, None
        since_ms = draft.snapshot.now_ms - core.resident.changed_ms
        if since_ms > 1000 * draft.snapshot.settings.move_s:
            core = draft.change(core, why, tier=Tier.ACCELERATOR)
            told = "it could not be left as a checkpoint"
            return replace(found, wanted=core.resident.apart, changes=MOST, why=told), core
        return found, core
    able = core.awake and core.resident.settled and job.checkpointed and not job.held
    if found.wanted == core.resident.apart or not able:
        return found, core
    for engine in draft.team(job.id).turning:
        draft.remove(engine, why)
    core = draft.change(core, why, tier=Tier.ABSENT, turns=False)
    return replace(found, changes=found.changes + 1, window=None), core


def _key(apart: Apart | None) -> tuple[int, ...]:
    return tuple(apart.told()) if apart is not None else ()
