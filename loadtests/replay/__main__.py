"""Replay test: a trainer killed in any phase of a step must leave the undisturbed run's weights,
bit for bit.

Usage:

    python -m loadtests.replay [JOB]

Each run is the same job: deterministic, no staleness, so that what is sampled depends on nothing
but the weights. In one more run the settings change between two steps, neither of which a
checkpoint covers, and the trainer dies after that: steps from before the change are repeated with
the old values, and the others with the new.

Prints one JSON object; exit status 1 unless it died in every phase, all digests are equal and no
trajectory is lost or trained twice.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from loadtests.measuring.entry import options, report
from loadtests.replay.runs import (
    CHANGED_DEATHS,
    DEATHS,
    JOB,
    STEPS,
    STOPPED_AFTER,
    changed_run,
    one_run,
)


def main() -> int:
    parser = options(
        __doc__,
        steps=STEPS,
        stopped_after=(STOPPED_AFTER, "steps"),
        changed_deaths=[*CHANGED_DEATHS],
    )
    parser.add_argument("job", type=Path, nargs="?", default=JOB)
    parser.add_argument(
        "--deaths",
        action="append",
        type=lambda text: tuple(text.split(",")),
        metavar="PHASE@STEP,...",
        help="of one run; given several times, of as many",
    )
    a = parser.parse_args()
    job, every = a.job.resolve(), a.deaths or DEATHS
    with tempfile.TemporaryDirectory(prefix="meshrl-") as scratch:
        undisturbed, *runs = [
            one_run(job, Path(scratch) / str(number), deaths, a.steps)
            for number, deaths in enumerate([(), *every])
        ]
        beside = Path(scratch) / "changed"
        changed = changed_run(job, beside, a.changed_deaths, a.steps, a.stopped_after)
    result = {
        "phases_killed": sum(len(run["deaths"]) for run in runs),
        "bit_identical": int(all(run["manifests"] == undisturbed["manifests"] for run in runs)),
        "lost": sum(run["lost"] for run in runs),
        "trained_twice": sum(run["trained_twice"] for run in runs),
        "changed_bit_identical": int(changed["lineages"] == [0]),
    }
    report(result)
    good = result["bit_identical"] and not result["lost"] and not result["trained_twice"]
    good = good and result["changed_bit_identical"] and not changed["lost"]
    good = good and changed["deaths"] == sorted(a.changed_deaths)
    return 0 if good and result["phases_killed"] == sum(map(len, every)) else 1


if __name__ == "__main__":
    sys.exit(main())
