"""Makes every mistake that users are known to make, and says which are told clearly and in time.

    python -m loadtests.mistakes                    # all, on real meshes
    python -m loadtests.mistakes --only rollout     # those with this in their names
    python -m loadtests.mistakes --list

Prints a line for each and, last, one JSON object: `clear_at_once` is the share of what can be known
before a mesh starts that is said within 3 s (and what the user's own code takes) without one being
started, `clear_within_20s` the share of the rest; `silent` and `destroyed` count.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from loadtests.measuring.entry import options, report, tell
from loadtests.mistakes.mistake import ALL
from loadtests.mistakes.trying import Verdict, attempt


def main() -> int:
    parser = options(
        __doc__,
        only=("", "mistakes with this in their names"),
        jobs=(1, "tried at a time"),
        out=(Path, "a file for every verdict, as JSON lines"),
        list=(False, "names them and ends"),
    )
    given = parser.parse_args()
    chosen = [mistake for mistake in ALL if given.only in mistake.name]
    twice = [name for name, count in Counter(m.name for m in ALL).items() if count > 1]
    assert not twice, twice
    if given.list:
        print(*(mistake.name for mistake in chosen), sep="\n")
        return 0
    with ThreadPoolExecutor(given.jobs) as pool:
        verdicts = []
        for verdict in pool.map(attempt, chosen):
            verdicts.append(verdict)
            tell(_told(verdict))
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
    report(_summary(verdicts))
    return 0 if all(v.clear and not v.destroyed for v in verdicts) else 1


def _told(verdict: Verdict) -> str:
    when = "never" if verdict.said_s is None else f"{verdict.said_s:.1f} s"
    mark = "ok  " if verdict.clear and not verdict.destroyed else "FAIL"
    wrong = [*(f"not said: {text}" for text in verdict.missing), *verdict.faults]
    wrong += [f"destroyed: {name}" for name in verdict.destroyed[:3]]
    if verdict.said_s is not None and verdict.said_s > verdict.by_s:
        wrong.append(f"late: by {verdict.by_s:g} s")
    return f"{mark} {when:>7} {verdict.name}" + (f" ({'; '.join(wrong)})" if wrong else "")


def _summary(verdicts: list[Verdict]) -> dict[str, object]:
    before = [v for v in verdicts if not v.running]
    running = [v for v in verdicts if v.running]
    return {
        "mistakes": len(verdicts),
        "before": len(before),
        "clear_at_once": _share(before),
        "running": len(running),
        "clear_within_20s": _share(running),
        "silent": sum(v.silent for v in verdicts),
        "destroyed": sum(bool(v.destroyed) for v in verdicts),
        "unclear": [v.name for v in verdicts if not v.clear],
    }


def _share(verdicts: list[Verdict]) -> float | None:
    if not verdicts:
        return None
    return round(sum(v.clear for v in verdicts) / len(verdicts), 3)


if __name__ == "__main__":
    sys.exit(main())
