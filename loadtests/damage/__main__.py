"""Damages every kind of durable file in every way, at rest and under a running mesh, and says what
a run makes of it.

    python -m loadtests.damage --count 20 --seed 1   # twenty, drawn
    python -m loadtests.damage --jobs 2 --out FILE   # all; what FILE has is not tried again
    python -m loadtests.damage --list

Prints a line for each trial and, last, one JSON object: `hung` (no end within 180 s, or no named
failure within 60 s) and `silent` (a traceback, a wrong account, or nothing said) count and are to
be 0; `recovered` is the share that went on to its last step with an account that is right; the
rest failed by name.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.damage.files import KINDS
from loadtests.damage.harms import HARMS
from loadtests.damage.trials import AT_REST, RUNNING, Slot, Trial, Verdict
from loadtests.measuring.entry import options, report, tell

ALL = [Trial(kind, how, when) for kind in KINDS for how in HARMS for when in (AT_REST, RUNNING)]


def main() -> int:
    parser = options(
        __doc__,
        only=("", "trials with this in their names"),
        count=(0, "as many, drawn; 0: all"),
        seed=1,
        jobs=(1, "tried at a time"),
        out=(Path, "a file for every verdict, as JSON lines"),
        list=(False, "names them and ends"),
    )
    given = parser.parse_args()
    chosen = [trial for trial in ALL if given.only in trial.name]
    if given.count:
        chosen = random.Random(given.seed).sample(chosen, min(given.count, len(chosen)))
    if given.list:
        print(*(trial.name for trial in chosen), sep="\n")
        return 0
    verdicts = _known(given.out)
    left = [trial for trial in chosen if trial.name not in verdicts]
    for verdict in tried(left, given.jobs):
        verdicts[verdict.name] = asdict(verdict)
        tell(_told(verdict))
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    answer = summary([verdicts[trial.name] for trial in chosen])
    report(answer)
    return 0 if not answer["hung"] and not answer["silent"] else 1


def tried(trials: list[Trial], jobs: int) -> Any:
    """The verdicts as they come."""
    if not trials:
        return
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        slots: queue.Queue[Slot] = queue.Queue()
        for number in range(min(jobs, len(trials))):
            slot = Slot(Path(folder) / str(number))
            slot.prepare()
            slots.put(slot)

        def attempt(trial: Trial) -> Verdict:
            slot = slots.get()
            try:
                return slot.attempt(trial)
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(attempt, trials)


def _known(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.is_file():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    return {row["name"]: row for row in rows}


def _told(verdict: Verdict) -> str:
    why = f": {verdict.why}" if verdict.why else ""
    return f"{verdict.outcome:9} {verdict.ended_s:6.1f} s  {verdict.name} ({verdict.path}){why}"


def summary(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    count = Counter(verdict["outcome"] for verdict in verdicts)
    made = len(verdicts) - count["skipped"]
    return {
        "trials": made,
        "skipped": count["skipped"],
        "hung": count["hung"],
        "silent": count["silent"],
        "named": count["named"],
        "recovered": round(count["recovered"] / made, 3) if made else None,
        "lost": sum(verdict["lost"] or 0 for verdict in verdicts),
        "trained_twice": sum(verdict["trained_twice"] or 0 for verdict in verdicts),
        "wrong": [v["name"] for v in verdicts if v["outcome"] in ("hung", "silent")],
    }


if __name__ == "__main__":
    sys.exit(main())
