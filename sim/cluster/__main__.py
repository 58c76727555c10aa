"""Runner of a scenario's arms on a simulated cluster, with speed-ups over the first arm.

Usage:

    python -m meshrl.sim.cluster SCENARIO | --from RUN
                          [--what-if KEY=VALUE] [--set KEY=VALUE] [--out DIR]

SCENARIO is a TOML file, or the name of one in `sim/cluster/scenarios`; without it their names are
listed. `--from` makes a scenario of a run's directory, reports the error of the simulated step
time, and writes it into `--out`. With `--what-if` the scenario is compared with itself after the
changes. `--set` changes all arms. `--out` writes a page and PNG files of the results. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from meshrl.common.base.errors import ConfigError, MeshError, NotFound
from meshrl.sim.cluster.arm_runner import run_arm
from meshrl.sim.cluster.job_figures import compute_ratios, flatten_figures, format_table
from meshrl.sim.cluster.model.cluster import SimCluster
from meshrl.sim.cluster.model.job import SimJob
from meshrl.sim.cluster.sources.recorded_run import read_run, write_scenario
from meshrl.sim.cluster.sources.scenario import Scenario, read_arms
from meshrl.sim.cluster.spot_figures import build_spot_charts, compute_spot_figures
from meshrl.view.report import charts, png
from meshrl.view.report.charts import Figure, Series
from meshrl.view.report.report_page import STYLE


def write_figures(
    title: str, table: str, found: Sequence[tuple[Figure, str]], out: Path
) -> list[Path]:
    """Write `index.html` and PNG files into a directory; raise NotFound without matplotlib."""
    png.require_matplotlib()
    out.mkdir(parents=True, exist_ok=True)
    body = "".join(
        f"<h2>{escape(one.title)}</h2>{charts.draw_line_chart(one.series, label)}"
        for one, label in found
    )
    page = out / "index.html"
    page.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{escape(title)}</h1><pre>{escape(table)}</pre>{body}</html>\n",
        encoding="utf-8",
    )
    drawn = (png.write_line_chart(one, out, label) for one, label in found)
    return [page, *(path for path in drawn if path is not None)]


def build_figures(arms: Mapping[str, SimCluster]) -> list[tuple[Figure, str]]:
    """Build the figures with the labels of their axes. Each job has its steps by arm, and its
    workers by role over time.
    """
    found: list[tuple[Figure, str]] = []
    for job in dict.fromkeys(name for cluster in arms.values() for name in cluster.jobs):
        there = {arm: cluster.jobs[job] for arm, cluster in arms.items() if job in cluster.jobs}
        steps = []
        for arm, one in there.items():
            ends = pairwise([one.training_started_s or 0.0, *one.training.step_ends_s])
            steps.append(Series(arm, [(float(n), b - a) for n, (a, b) in enumerate(ends, 1)]))
        found.append((Figure(f"{job}: seconds of a step", steps), "step"))
        for arm, one in there.items():
            shares = Figure(
                f"{job}, {arm}: workers", _build_share_series(one, arms[arm].event_queue.now_s)
            )
            found.append((shares, "seconds"))
    return found


def _build_share_series(job: SimJob, end_s: float) -> list[Series]:
    """Build step functions of the numbers of rollout and training workers."""
    found: list[list[tuple[float, float]]] = [[], []]
    ends = [since_s for since_s, *_ in job.worker_shares[1:]] + [end_s]
    for (since_s, *counts), until_s in zip(job.worker_shares, ends, strict=True):
        for points, count in zip(found, counts, strict=True):
            points += [(since_s, float(count)), (until_s, float(count))]
    return [Series("rollout", found[0]), Series("training", found[1])]


SCENARIOS = Path(__file__).parent / "scenarios"


def _run_seeds(
    path: Path, changes: Sequence[str], scenario: Scenario, known: dict[str, SimCluster]
) -> dict[str, list[float]]:
    """Compute the ratios of arms, by name, with each of a scenario's seeds; `known` are the
    clusters that have run with the first seed.
    """
    found: dict[str, list[float]] = {}
    for seed in range(scenario.seed, scenario.seed + scenario.seeds):
        arms = read_arms(path, [*changes, f"seed={seed}"])
        known = known if seed == scenario.seed else {}
        last = list(arms)[-1]
        there = [name for name, arm in arms.items() if arm.table.ratio or name == last]
        results = {name: run_arm(arms[name], path.parent, known) for name in there}
        figures = {name: one.figures for name, one in results.items()}
        ratios = compute_ratios(figures, {}, {name: arms[name].table.ratio for name in there})
        for name, value in ratios.items():
            assert isinstance(value, float)
            found.setdefault(name, []).append(value)
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="meshrl simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", default="")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN")
    parser.add_argument("--what-if", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for plots")
    a = parser.parse_args(words)
    if not a.scenario and a.run is None:
        for path in sorted(SCENARIOS.glob("*.toml")):
            print(f"{path.stem:12} {tomllib.loads(path.read_text(encoding='utf-8'))['title']}")
        return 0
    gc.set_threshold(200_000, 20, 100)  # most objects are large and live long
    with TemporaryDirectory() as folder:
        return _simulate(a, Path(folder))


def _simulate(args: argparse.Namespace, folder: Path) -> int:
    path, measured = Path(args.scenario), None
    if not path.suffix and not path.exists():
        path = SCENARIOS / f"{args.scenario}.toml"
    try:
        if args.run is not None and args.scenario:
            raise ConfigError(
                "SCENARIO and --from RUN exclude each other", fix="Pass SCENARIO or --from RUN"
            )
        if args.run is None and path.parent == SCENARIOS and not path.exists():
            here = ", ".join(sorted(one.stem for one in SCENARIOS.glob("*.toml")))
            raise NotFound(
                f"the scenario {args.scenario} does not exist", fix=f"Pass a file, or one of {here}"
            )
        if args.run is not None:
            measured = read_run(args.run)
            path = write_scenario(measured, args.out or folder)
        arms = read_arms(path, args.set)
        if args.what_if:
            changed = read_arms(path, [*args.set, *args.what_if])
            if_ = " ".join(args.what_if)
            arms = {**arms, **{f"{name} if {if_}": arm for name, arm in changed.items()}}
        known: dict[str, SimCluster] = {}
        results = {name: run_arm(arm, path.parent, known) for name, arm in arms.items()}
        figures = {name: one.figures for name, one in results.items()}
        papers = {name: one.arm.paper for name, one in results.items()}
        table = format_table(figures, papers)
        print(table)
        for name, one in results.items():
            if one.best_settings:
                print(f"{name}: {one.best_settings}")
            for job in one.cluster.jobs.values():
                if not (job.training.is_finished or one.cluster.has_availability):
                    spec, until_s = job.spec, one.cluster.event_queue.now_s
                    why = one.cluster.get_block_reason(spec.name) or f"until_s is {until_s:.0f}"
                    progress = f"{spec.name} completed {job.training.version} of {spec.steps} steps"
                    print(f"{name}: {progress}: {why}", file=sys.stderr)
        scenario = next(iter(next(iter(arms.values())).scenarios.values()))
        for source in scenario.sources:
            print(f"- {source}")
        spot = compute_spot_figures(results, scenario)
        if args.out is not None:
            clusters = {name: one.cluster for name, one in results.items()}
            found = build_figures(clusters) if not spot else build_spot_charts(results)
            for drawn in write_figures(scenario.title or path.stem, table, found, args.out):
                print(drawn)
        several = scenario.seeds > 1 and not args.what_if
        ratios_of = _run_seeds(path, args.set, scenario, known) if several else {}
    except MeshError as error:
        print(error, file=sys.stderr)
        return 2
    for name, values in ratios_of.items():
        print(f"{name}: {values}")
    run_figures: dict[str, float] = {}
    if measured is not None:
        (first,) = next(iter(figures.values())).values()
        off = first.step_s / measured.step_s - 1
        about = f"measured run: {measured.step_s:.4g} s/step"
        print(f"{about}; error of its simulation: {off:+.1%}")
        run_figures = {"run_step_s": round(measured.step_s, 4), "run_error": round(off, 4)}
    ratios = {name: one.arm.ratio for name, one in results.items()}
    cpu = {f"{name.replace(' ', '_')}_cpu_s": round(one.cpu_s, 2) for name, one in results.items()}
    medians: dict[str, float | list[float]] = {}
    for name, values in ratios_of.items():
        medians |= {name: median(values), f"{name}_seeds": values}
    total = {"cpu_s": round(sum(one.cpu_s for one in results.values()), 2)}
    print(
        json.dumps(
            flatten_figures(figures)
            | cpu
            | compute_ratios(figures, papers, ratios)
            | medians
            | run_figures
            | spot
            | total
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
