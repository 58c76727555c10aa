"""Figures of a job with workers that may vanish, from the arms of `scenarios/spot.toml`, and their
counterparts in RLBoost (arXiv 2510.19225).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from meshrl.sim.cluster.arm_runner import ArmResult
from meshrl.sim.cluster.job_figures import JobFigures
from meshrl.sim.cluster.sources.scenario import Scenario
from meshrl.view.report.charts import Figure, Series

ALONE, TWICE, APART, SPOT = "reserved", "reserved twice", "disaggregated", "spot"
SAME_SHARE = 0.15  # of a seeding time: as close as this, it has converged
VANISHED = "three of six vanish at {} s"


def compute_spot_figures(
    arms: Mapping[str, ArmResult], scenario: Scenario
) -> dict[str, float | list[float]]:
    """Compute the means over segments, with the values of each segment; only those whose arms ran.

    Throughput is in trained tokens per second, and cost in that of all reserved workers and of the
    others in use. `break_even_discount` is the discount with which tokens per cost equal those of
    reserved workers alone.
    """
    names = [segment.name for segment in scenario.segments]
    one = {name: next(iter(arm.figures.values())) for name, arm in arms.items()}

    def of_segments(arm: str) -> list[JobFigures]:
        return [one[f"{arm}, {name}"] for name in names if f"{arm}, {name}" in one]

    spot, alone = of_segments(SPOT), one.get(ALONE)
    if not spot or alone is None:
        return {}
    found: dict[str, float | list[float]] = {}

    def add(key: str, values: Sequence[float]) -> None:
        found[key] = round(fmean(values), 4)
        if len(values) > 1:
            found[f"{key}_segments"] = [round(value, 4) for value in values]

    def add_throughput(key: str, before: Sequence[JobFigures]) -> None:
        if before:
            found[key] = round(_sum_rates(spot) / _sum_rates(before) - 1, 4)

    add("throughput_ratio", [f.trained_per_s / alone.trained_per_s for f in spot])
    add("tokens_per_dollar_gain", [f.trained_per_cost / alone.trained_per_cost - 1 for f in spot])
    if without := of_segments("no seeding"):
        found["without_seeding"] = round(_sum_rates(without) / _sum_rates(spot) - 1, 4)
    add_throughput("memory_gain", of_segments("no memory"))
    add_throughput("migration_gain", of_segments("recompute"))
    add_throughput("pull_gain", of_segments("barrier"))
    for key, name in (("over_reserved_twice", TWICE), ("over_disaggregated", APART)):
        if name in one:
            add(key, [f.trained_per_s / one[name].trained_per_s - 1 for f in spot])
    if APART in one:
        add(
            "disaggregated_cost_over_spot",
            [f.trained_per_cost / one[APART].trained_per_cost - 1 for f in spot],
        )
    base_s = one["all stay"].step_s if "all stay" in one else 0.0
    for at_s in (100, 200):
        moved = one.get(VANISHED.format(at_s))
        again = one.get(f"{VANISHED.format(at_s)}, recompute")
        if moved is not None and again is not None and again.step_s > base_s > 0:
            saved = 1 - (moved.step_s - base_s) / (again.step_s - base_s)
            found[f"migrate_over_recompute_{at_s}_s"] = round(saved, 4)
    if always := of_segments("any price"):
        price = max((h.price for h in scenario.hosts if h.market == "reserved"), default=0.0)
        spot_price = max((h.price for h in scenario.hosts if h.market != "reserved"), default=0.0)
        rates = [
            _find_break_even(f, alone, f.trained_per_s * f.rl_s, spot_price) / price for f in always
        ]
        add("break_even_discount", [1 - rate for rate in rates])
    if full := of_segments("no discount"):
        add("no_discount_workers", [f.spot_workers for f in full])
    for key, name in (("four_times", "four times"), ("a_quarter", "a quarter")):
        if "static 4" in arms and (there := arms.get(f"static 4, {name} of the first")):
            found[f"convergence_steps_{key}"] = _count_steps(there, arms["static 4"])
    static = [one[f"static {n}"] for n in range(1, 7) if f"static {n}" in one]
    if static:
        found["static_ratios"] = [round(f.trained_per_s / alone.trained_per_s, 4) for f in static]
    return found


def _sum_rates(figures: Sequence[JobFigures]) -> float:
    return sum(one.trained_per_s for one in figures)


def _find_break_even(
    figures: JobFigures, alone: JobFigures, tokens: float, spot_price: float
) -> float:
    """Return the hourly price of a spot worker with which tokens cost what they do alone."""
    spot_hours = figures.spot_workers * figures.rl_s / 3600
    reserved_cost = figures.cost - spot_hours * spot_price
    return (tokens / alone.trained_per_cost - reserved_cost) / spot_hours if spot_hours else 0.0


def _count_steps(arm: ArmResult, usual: ArmResult) -> int:
    """Count the measured steps until the seeding time is and stays that of the usual arm's last
    steps.
    """
    history, known = (
        [seed_s for _, seed_s, _ in next(iter(one.cluster.jobs.values())).window.history]
        for one in (arm, usual)
    )
    last_s = fmean(known[-4:])
    off = [abs(seed_s - last_s) > SAME_SHARE * last_s for seed_s in history]
    return max((n for n, is_off in enumerate(off) if is_off), default=-1) + 1


def build_spot_charts(arms: Mapping[str, ArmResult]) -> list[tuple[Figure, str]]:
    """Build charts of workers, throughput and cost over time, one of each for each segment."""
    found: list[tuple[Figure, str]] = []
    for name, arm in arms.items():
        if not name.startswith(f"{SPOT}, "):
            continue
        cluster = arm.cluster
        job, end_s = next(iter(cluster.jobs.values())), cluster.event_queue.now_s
        ends = [0.0, *job.training.step_ends_s]
        tokens = [0.0, *job.training.step_tokens]
        rates = [
            (b, (more - less) / (b - a))
            for a, b, less, more in zip(ends, ends[1:], tokens, tokens[1:], strict=False)
        ]
        alone = arms.get(ALONE)
        level = next(iter(alone.figures.values())).trained_per_s if alone is not None else 0.0
        throughput = [Series(name, rates), Series(ALONE, [(0.0, level), (end_s, level)])]
        untils = [since_s for since_s, *_ in cluster.costs[1:]] + [end_s]
        cost, workers = [], []
        for (since_s, hourly, spot), until_s in zip(cluster.costs, untils, strict=True):
            cost += [(since_s, hourly), (until_s, hourly)]
            workers += [(since_s, float(spot)), (until_s, float(spot))]
        found += [
            (Figure(f"{name}: workers that may vanish", [Series(name, workers)]), "seconds"),
            (Figure(f"{name}: trained tokens a second", throughput), "seconds"),
            (Figure(f"{name}: cost of an hour", [Series(name, cost)]), "seconds"),
        ]
    return found
