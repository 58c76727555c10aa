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
import time
import tomllib
from pathlib import Path

from common.errors import MeshError
from sim.cluster.building import cluster_of
from sim.cluster.cluster import Cluster
from sim.cluster.drawing import draw
from sim.cluster.figures import Figures, figures_of, flat, table
from sim.cluster.job import SimJob
from sim.cluster.scenario import Scenario, read

SCENARIOS = Path(__file__).parent / "scenarios"


def run(scenario: Scenario, base: Path) -> Cluster:
    """The cluster of an arm when its jobs are over."""
    cluster = cluster_of(scenario, base)
    cluster.run(scenario.until_s)
    return cluster


def found(cluster: Cluster) -> dict[str, Figures]:
    """The figures of each job."""
    return {name: figures_of(cluster, job) for name, job in cluster.jobs.items()}


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
            arms = {
                **arms,
                **{f"{name} if {' '.join(a.what_if)}": s for name, s in changed.items()},
            }
        began_s = time.process_time()
        ran = {name: run(scenario, path.parent) for name, scenario in arms.items()}
        cpu_s = time.process_time() - began_s
        figures = {name: found(cluster) for name, cluster in ran.items()}
        print(table(figures))
        for name, cluster in ran.items():
            for job in cluster.jobs.values():
                if not job.training.over:
                    _unfinished(name, cluster, job)
        if a.out is not None:
            title = next(iter(arms.values())).title or path.stem
            for drawn in draw(title, table(figures), ran, a.out):
                print(drawn)
    except MeshError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(flat(figures) | {"cpu_s": round(cpu_s, 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
