"""Pauses between the steps of runs, by the process that a fault hit during each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Kinds of pauses, by the faults during them.
UNDISTURBED, COMMON, OTHER, OWN = "undisturbed", "common", "other", "own"


@dataclass(frozen=True, slots=True)
class Pause:
    """Time between two steps of a job, in seconds."""

    kind: str
    duration_s: float


def read_steps(out: Path) -> list[dict[str, Any]]:
    """Return the events of a run's steps; none without a record."""
    try:
        events = map(json.loads, (out / "events.jsonl").read_text().splitlines())
        return [event for event in events if event["kind"] == "step"]
    except OSError:
        return []


def classify_pauses(
    steps: Sequence[Mapping[str, Any]], faults: Sequence[Mapping[str, Any]]
) -> Iterator[Pause]:
    """Yield the pauses between steps of a job.

    A fault lasts from its signal (`at`) until the process continues or is dead (`until`). A pause
    with a fault of one of the job's own processes is OWN; else with one of a process that serves
    several jobs, such as a worker, COMMON; else with one of another job's process, OTHER.
    """
    for last, step in itertools.pairwise(steps):
        start_s, end_s = last["ms"] / 1000, step["ms"] / 1000
        hit = {one["job"] for one in faults if one["at"] < end_s and one["until"] > start_s}
        if step["fields"]["job"] in hit:
            kind = OWN
        elif "" in hit:
            kind = COMMON
        else:
            kind = OTHER if hit else UNDISTURBED
        yield Pause(kind, end_s - start_s)


def describe_pauses(runs: Iterable[Path], faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the longest pauses in seconds: of each run, and of all by kind; None without any."""
    found = {out.name: list(classify_pauses(read_steps(out), faults)) for out in runs}
    everything = [one for pauses in found.values() for one in pauses]
    by_kind = {
        f"{kind}_pause_s": _find_longest_s(one for one in everything if one.kind == kind)
        for kind in (OTHER, COMMON, OWN, UNDISTURBED)
    }
    by_job = {f"longest_pause_s_{job}": _find_longest_s(pauses) for job, pauses in found.items()}
    return {"longest_pause_s": _find_longest_s(everything), **by_job, **by_kind}


def _find_longest_s(pauses: Iterable[Pause]) -> float | None:
    return max((round(one.duration_s, 2) for one in pauses), default=None)
