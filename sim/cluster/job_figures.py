"""Figures of an arm, and a table of all arms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean

from meshrl.sim.cluster.model.cluster import SimCluster
from meshrl.sim.cluster.model.job import SimJob


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Figures of one job of an arm. Seconds are simulated."""

    steps: int
    rl_s: float  # from the start of its training to its last step
    step_s: float  # mean
    sampled_per_s: float  # generated tokens
    trained_per_s: float  # tokens
    engines_busy: float  # busy share of the time of the engines that exist at the end
    requeued: int  # stale trajectories
    moves: int
    paid: int  # moves that the planner judged as paid
    judged: int  # judged moves
    cost: float = 0.0  # until its last step, of all workers
    spot_workers: float = 0.0  # mean number of workers in use that may vanish
    trained_per_cost: float = 0.0  # tokens, if prices are known


def compute_figures(cluster: SimCluster, job: SimJob) -> JobFigures:
    training, step_ends_s = job.training, job.training.step_ends_s
    began_s = job.training_started_s or 0.0
    rl_s = step_ends_s[-1] - began_s if step_ends_s else cluster.event_queue.now_s - began_s
    steps_s = [b - a for a, b in pairwise([began_s, *step_ends_s])]
    trained = training.step_tokens[-1] if training.step_tokens else 0.0
    name, over_s = job.spec.name, max(rl_s, 1e-9)
    busy = [e.busy_s / max(e.uptime_s, 1e-9) for e in job.engines]
    cost, spot_workers = cluster.compute_cost(began_s + rl_s)
    judged = [one for one in cluster.judged_moves if one.job == name]
    return JobFigures(
        steps=training.version,
        rl_s=rl_s,
        step_s=mean(steps_s) if steps_s else 0.0,
        sampled_per_s=job.sampled_tokens / over_s,
        trained_per_s=trained / over_s,
        engines_busy=mean(busy) if busy else 0.0,
        requeued=training.requeued_trajectories,
        moves=sum(one.job == name for one in cluster.moves),
        paid=sum(bool(one.details["paid"]) for one in judged),
        judged=len(judged),
        cost=cost,
        spot_workers=spot_workers,
        trained_per_cost=trained / cost if cost else 0.0,
    )


def format_table(
    arms: Mapping[str, Mapping[str, JobFigures]], published: Mapping[str, float]
) -> str:
    """Format a table of arms and their jobs. The last columns are the speed-up over the first arm,
    and the published one if there is any.
    """
    heads = ("arm", "job", "steps", "s/step", "tokens/s", "trained/s", "busy", "moves", "faster")
    has_published = any(published.values())
    rows: list[tuple[str, ...]] = [(*heads, "paper") if has_published else heads]
    for arm, jobs in arms.items():
        for name, f in jobs.items():
            row = (
                arm,
                name,
                str(f.steps),
                f"{f.step_s:.4g}",
                f"{f.sampled_per_s:.4g}",
                f"{f.trained_per_s:.4g}",
                f"{f.engines_busy:.2f}",
                str(f.moves),
                f"{compute_speedup(arms, arm, name):.3f}",
            )
            paper = published.get(arm, 0.0)
            rows.append((*row, f"{paper:.2f}" if paper else "") if has_published else row)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = (
        "  ".join(
            c.ljust(w) if n < 2 else c.rjust(w)
            for n, (c, w) in enumerate(zip(r, widths, strict=True))
        ).rstrip()
        for r in rows
    )
    return "\n".join(lines)


def compute_speedup(arms: Mapping[str, Mapping[str, JobFigures]], arm: str, job: str) -> float:
    """Compute the speed-up of a job's steps over the first arm; 0 if either has no steps."""
    first, here = next(iter(arms.values())).get(job), arms[arm][job]
    return first.step_s / here.step_s if first is not None and here.step_s else 0.0


def flatten_figures(arms: Mapping[str, Mapping[str, JobFigures]]) -> dict[str, float]:
    """Return every figure by arm and job, with its speed-up over the first arm."""
    found: dict[str, float] = {}
    for arm, jobs in arms.items():
        for name, f in jobs.items():
            at = f"{arm}_{name}" if len(jobs) > 1 else arm
            key = at.replace(" ", "_")
            found |= {f"{key}_{figure}": round(value, 4) for figure, value in asdict(f).items()}
            if ratio := compute_speedup(arms, arm, name):
                found[f"{key}_faster"] = round(ratio, 4)
    return found


def compute_ratios(
    arms: Mapping[str, Mapping[str, JobFigures]],
    published: Mapping[str, float],
    ratio_names: Mapping[str, str],
) -> dict[str, float | list[float]]:
    """Compute ratios of first jobs. `ladder` has the simulated speed-ups of the arms with published
    ones, and `ladder_off` their largest relative error. `ratio_names` names the ratio of the
    last arm's trained tokens per second to those of each arm.
    """

    def trained(arm: str) -> float:
        return next(iter(arms[arm].values())).trained_per_s

    found: dict[str, float | list[float]] = {}
    rungs = {arm: speedup for arm, speedup in published.items() if speedup}
    if rungs:
        base = trained(next(iter(rungs)))
        ladder = [round(trained(arm) / base, 4) if base else 0.0 for arm in rungs]
        off = max(
            abs(here / speedup - 1) for here, speedup in zip(ladder, rungs.values(), strict=True)
        )
        found = {
            "ladder": ladder,
            "ladder_paper": list(rungs.values()),
            "ladder_off": round(off, 4),
        }
    last = trained(list(arms)[-1])
    for arm, name in ratio_names.items():
        if name and trained(arm):
            found[name] = round(last / trained(arm), 4)
    return found
