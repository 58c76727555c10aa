"""The verdict on runs under faults: whether anything was lost, and whether each has learned."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.chaos.pauses import describe_pauses
from meshrl.common.state import jobs

NAMED_S = 30.0  # limit for naming a stopped process that blocks others
LEARNT = 0.85  # held-out accuracy that each job must reach
BOOKS = ("lost", "trained_twice", "typed_drops")


@dataclass
class Report:
    """Faults that were made, and how soon processes that were stopped were named."""

    faults: list[dict[str, Any]] = field(default_factory=list)
    named_s: list[float] = field(default_factory=list)  # of stops that blocked another process
    unnamed: list[str] = field(default_factory=list)

    def count_faults(self, fault: str) -> int:
        return sum(one["fault"] == fault for one in self.faults)

    def count_hits(self, job: str) -> int:
        """Return the faults of processes that work for a job alone; empty: for several jobs."""
        return sum(one["job"] == job for one in self.faults)


def verdict(
    runs: Mapping[Path, Mapping[str, Any]],
    report: Report,
    count: int,
    audits: Mapping[Path, int],
) -> dict[str, Any]:
    """Return one object; `ok` determines the exit status.

    Args:
        runs: The summary of each run, by its directory.
        report: What was done to them.
        count: Faults that were asked for.
        audits: Exit status of `meshrl audit` for each run.
    """
    first = min((fault["at"] for fault in report.faults), default=time.time())
    found = list(runs.values())
    after = [(one.get("held_out") or {}).get("after") or {} for one in found]
    reached = [one.get("greedy") for one in after]
    books = {key: [one.get(key) for one in found] for key in BOOKS}
    answer: dict[str, Any] = {
        "jobs": len(runs),
        "faults": len(report.faults),
        "count": count,
        "kills": report.count_faults("kill"),
        "stops": report.count_faults("stop"),
        "damages": report.count_faults("damage"),
        "full_disks": report.count_faults("full"),
        "hit": ",".join(f"{fault['fault']}:{fault['name']}" for fault in report.faults),
        "completed": sum(one.get("phase") == jobs.Phase.FINISHED for one in found),
        "continued": sum(continued(run, first) for run in runs),
        **{key: None if None in told else sum(told) for key, told in books.items()},
        "held_out_greedy": min((share or 0.0 for share in reached), default=None),
        **{f"held_out_greedy_{run.name}": s for run, s in zip(runs, reached, strict=True)},
        **describe_pauses(runs, report.faults),
        "audits_failed": sum(status != 0 for status in audits.values()),
        **{f"audit_{run.name}": status for run, status in audits.items()},
        "wall_s": max((one.get("wall_s") or 0.0 for one in found), default=None),
        "stall_named_s": None if report.unnamed else round(max(report.named_s, default=0.0), 2),
        "stalls_checked": len(report.named_s) + len(report.unnamed),
        "stalls_unnamed": ",".join(report.unnamed),
        "run": str(next(iter(runs), "")),
    }
    answer["ok"] = int(
        answer["completed"] == answer["jobs"] > 0
        and all(answer[key] == 0 for key in (*BOOKS, "audits_failed"))
        and answer["held_out_greedy"] >= LEARNT
        and answer["continued"] >= 1
        and answer["faults"] == count
        and (answer["jobs"] > 1 or answer["stops"] == 0 or answer["stalls_checked"] >= 1)
        and (answer["stall_named_s"] is not None and answer["stall_named_s"] <= NAMED_S)
    )
    return answer


def continued(out: Path, first_fault: float) -> int:
    """Return the trajectories that were opened before the first fault and trained after it."""
    opened: dict[int, int] = {}
    trained = 0
    try:
        lines = (out / "events.jsonl").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        event = json.loads(line)
        fields = event["fields"]
        if event["kind"] == "opened" and event["ms"] / 1000 < first_fault:
            opened |= dict.fromkeys(fields["groups"], fields["samples"])
        elif event["kind"] == "step" and event["ms"] / 1000 > first_fault:
            trained += sum(row["scored"] for row in fields["groups"] if row["group"] in opened)
    return trained
