"""Runs the arms of a scenario on a simulated cluster, and compares them with the first one.

    python -m sim.cluster [SCENARIO] [--what-if KEY=VALUE] [--set KEY=VALUE] [--out DIR]

SCENARIO is a TOML file, or the name of one of those in `sim/cluster/scenarios`, which are named
when there is none. With `--what-if` the scenario is compared with itself, so changed; `--set`
changes all arms; `--out` writes a page and PNG files of what they did. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tomllib
from pathlib import Path

from common.errors import MeshError
from sim.cluster.cluster import Cluster
from sim.cluster.drawing import draw
from sim.cluster.figures import compared, flat, table
from sim.cluster.job import SimJob
from sim.cluster.running import run
from sim.cluster.scenario import read

SCENARIOS = Path(__file__).parent / "scenarios"


def _unfinished(arm: str, cluster: Cluster, job: SimJob) -> None:
    made, steps, job_name = job.training.version, job.spec.steps, job.spec.name
    why = cluster.held(job_name) or f"until_s is {cluster.agenda.now_s:.0f}"
    print(f"{arm}: {job_name} made {made} of {steps} steps: {why}", file=sys.stderr)


def main() -> int:
    """The entry; the exit status."""
    parser = argparse.ArgumentParser(
        prog="meshrl simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", default="")
    parser.add_argument("--what-if", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, metavar="DIR", help="writes plots there")
    a = parser.parse_args()
    if not a.scenario:
        for path in sorted(SCENARIOS.glob("*.toml")):
            print(f"{path.stem:12} {tomllib.loads(path.read_text(encoding='utf-8'))['title']}")
        return 0
    gc.set_threshold(200_000, 20, 100)  # what is there stays, mostly, and is large
    path = Path(a.scenario)
    if not path.suffix and not path.exists():
        path = SCENARIOS / f"{a.scenario}.toml"
    try:
        arms = read(path, a.set)
        if a.what_if:
            changed = read(path, [*a.set, *a.what_if])
            if_ = " ".join(a.what_if)
            arms = {**arms, **{f"{name} if {if_}": arm for name, arm in changed.items()}}
        known: dict[str, Cluster] = {}
        ran = {name: run(arm, path.parent, known) for name, arm in arms.items()}
        figures = {name: one.figures for name, one in ran.items()}
        papers = {name: one.about.paper for name, one in ran.items()}
        told = table(figures, papers)
        print(told)
        for name, one in ran.items():
            if one.chosen:
                print(f"{name}: {one.chosen}")
            for job in one.cluster.jobs.values():
                if not job.training.over:
                    _unfinished(name, one.cluster, job)
        scenario = next(iter(next(iter(arms.values())).tries.values()))
        for source in scenario.sources:
            print(f"- {source}")
        if a.out is not None:
            clusters = {name: one.cluster for name, one in ran.items()}
            for drawn in draw(scenario.title or path.stem, told, clusters, a.out):
                print(drawn)
    except MeshError as error:
        print(error, file=sys.stderr)
        return 2
    ratios = {name: one.about.ratio for name, one in ran.items()}
    cpu = {f"{name.replace(' ', '_')}_cpu_s": round(one.cpu_s, 2) for name, one in ran.items()}
    total = {"cpu_s": round(sum(one.cpu_s for one in ran.values()), 2)}
    print(json.dumps(flat(figures) | cpu | compared(figures, papers, ratios) | total))
    return 0


if __name__ == "__main__":
    sys.exit(main())
