"""Whether a trainer that gets SIGKILL in any phase of a step leaves the weights of a run that
nothing disturbed, bit for bit.

    python -m loadtests.replay [JOB]

Each run is the same job: deterministic, no staleness, so that what is sampled depends on nothing
but the weights. Prints one JSON object; exit status 1 unless it died in every phase, all digests
are equal and no trajectory is lost or trained twice.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshrl.observe.audit import audit

# A worker's budget is five restarts a minute, so the deaths are spread over two runs.
STEPS, CHECKPOINT_EVERY = 8, 4
DEATHS = (
    ("waiting@2", "computing@3", "updating@6", "staging@7"),
    ("checkpointing@4", "writing@4", "committing@6", "telling@7"),
)
JOB = Path(__file__).parents[1] / "tests/mesh/jobs/digits.toml"
RUN_S = 300.0
SETTINGS = {
    "budget.steps": STEPS,
    "training.checkpoint_every": CHECKPOINT_EVERY,
    "training.deterministic": "true",
    "algorithm.max_staleness": 0,
    "algorithm.filter_zero_variance": "false",
    "reward.deadline_s": 10.0,
    "evaluation.before": "false",
    "evaluation.after": "false",
    "evaluation.every": 0,
}


def one_run(job: Path, directory: Path, deaths: Sequence[str] = ()) -> dict[str, Any]:
    """The versions' digests, the lineage and the audit of a run in which the trainer died so."""
    marks = directory / "deaths"
    marks.mkdir(parents=True)
    words = SETTINGS | {"out": directory / "run"}
    environment = {k: v for k, v in os.environ.items() if k != "MESHRL_REDIS_URL"}
    if deaths:
        rank = [sys.executable, "-m", "loadtests.workers.dying_rank", "--die", *deaths]
        rank += ["--marks", str(marks)]
        environment["MESHRL_ROLE_COMMANDS"] = f"training={shlex.join(rank)}"
    argv = [sys.executable, "-m", "meshrl", "run", str(job)]
    argv += [f"--set={key}={value}" for key, value in words.items()]
    with (directory / "said").open("w") as said:
        ended = subprocess.run(argv, env=environment, stdout=said, stderr=said, timeout=RUN_S)
    if ended.returncode != 0:
        raise RuntimeError((directory / "said").read_text()[-3000:])
    lines = (directory / "run/events.jsonl").read_text().splitlines()
    committed = [e["fields"] for e in map(json.loads, lines) if e["kind"] == "step"]
    found = audit(directory / "run")
    return {
        "deaths": sorted(mark.name for mark in marks.iterdir()),
        "manifests": [step["manifest"] for step in committed],
        "lineages": sorted({step["lineage"] for step in committed}),
        "lost": found["lost"],
        "trained_twice": found["trained_twice"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, nargs="?", default=JOB)
    job = parser.parse_args().job.resolve()
    with tempfile.TemporaryDirectory(prefix="meshrl-") as scratch:
        undisturbed, *runs = [
            one_run(job, Path(scratch) / str(number), deaths)
            for number, deaths in enumerate([(), *DEATHS])
        ]
    result = {
        "phases_killed": sum(len(run["deaths"]) for run in runs),
        "bit_identical": int(all(run["manifests"] == undisturbed["manifests"] for run in runs)),
        "lineages": sorted({lineage for run in runs for lineage in run["lineages"]}),
        "lost": sum(run["lost"] for run in runs),
        "trained_twice": sum(run["trained_twice"] for run in runs),
        "deaths": [run["deaths"] for run in runs],
    }
    print(json.dumps(result))
    good = result["bit_identical"] and not result["lost"] and not result["trained_twice"]
    return 0 if good and result["phases_killed"] == sum(map(len, DEATHS)) else 1


if __name__ == "__main__":
    sys.exit(main())
