"""What containers cost the demo: `python -m loadtests.deploy [--pairs N] [--workers N]`, JSON.

Takes the images of `make test-compose` and the engine that the environment names. In turns the demo
runs on this host, as by `make demo`, and as `docker compose up` does it, from images to the demo's
end: `ratio_host` is the second's wall time over the first's. Then once more with small steps, with
every container restarted in mid-run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from loadtests.measuring.flat import flat
from tests.deploy.compose import project
from tests.deploy.compose.images.building import CODE, IMAGES
from tests.deploy.compose.project import DEMO, RUNS, Project

MOST_S = 3600.0
RESTARTED_STEPS = 100


def on_host(workers: int) -> dict[str, Any]:
    """The demo as `make demo` runs it; wall seconds and held-out accuracy. As in a new container,
    it makes its warm start, whatever this host's cache has.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run")
        command = [sys.executable, "-m", "meshrl", "run", "examples/calculator.toml"]
        command += ["--set", f"mesh.workers={workers}", "--set", f"out={run}", "--set", "cache="]
        began = time.monotonic()
        subprocess.run(
            command,
            cwd=CODE,
            stdout=sys.stderr,
            check=True,
            timeout=MOST_S,
        )
        wall_s = time.monotonic() - began
        return {"wall_s": wall_s, **_accuracy((run / "summary.json").read_text())}


def in_containers(mesh: Project) -> dict[str, Any]:
    """The demo as `docker compose up` runs it, from images to its end."""
    mesh.down()
    try:
        since = mesh.up()
        mesh.until("the first step", lambda: mesh.trains(DEMO), MOST_S)
        first_s = since()
        mesh.until("the demo ends", lambda: mesh.ended("demo"), MOST_S)
        wall_s = since()
        mesh.inside("head", "meshrl", "wait", f"{RUNS}/{DEMO}")  # until its summary is written
        said = mesh.inside("head", "cat", f"{RUNS}/{DEMO}/summary.json")
        return {"wall_s": wall_s, "compose_up_s": first_s, **_accuracy(said)}
    finally:
        mesh.down()


def restarted(mesh: Project) -> dict[str, Any]:
    """The account of a run in which each container was restarted once."""
    mesh.down()
    try:
        mesh.up()
        mesh.until("the first step", lambda: mesh.trains(DEMO), MOST_S)
        jobs = mesh.restart_each()
        for name in jobs:
            mesh.until(f"{name} ends", partial(mesh.finished, name), MOST_S)
        accounts = [mesh.account(name) for name in jobs]
        return {
            name: sum(account[name] for account in accounts) for name in ("lost", "trained_twice")
        }
    finally:
        mesh.down()


def _accuracy(summary: str) -> dict[str, Any]:
    return {"accuracy": json.loads(summary)["held_out"]["after"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    asked = parser.parse_args()
    engine = project.engine_here()
    if engine is None:
        sys.exit("no engine answers: python -m tests.deploy.engine start DIR")
    mesh = Project(engine, "meshrl-bench", asked.workers)
    sizes = {name: mesh.image_mb(name) for name in IMAGES}
    pairs = [(on_host(asked.workers), in_containers(mesh)) for _ in range(asked.pairs)]
    small = Project(engine, "meshrl-bench", asked.workers, project.short(RESTARTED_STEPS))
    ratios = [ours["wall_s"] / host["wall_s"] for host, ours in pairs]
    result = {
        "image_mb": sizes,
        "workers": asked.workers,
        **{f"host_{key}": [host[key] for host, _ in pairs] for key in ("wall_s", "accuracy")},
        **{f"compose_{key}": [ours[key] for _, ours in pairs] for key in ("wall_s", "accuracy")},
        "compose_up_s": statistics.median(ours["compose_up_s"] for _, ours in pairs),
        "ratio_host": statistics.median(ratios),
        "restarted": restarted(small),
    }
    print(json.dumps(flat(result)))


if __name__ == "__main__":
    main()
