"""`meshrl audit`: accounts for every trajectory, from the run's events and ledger alone."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from meshrl.common.base.errors import CorruptData, Refused
from meshrl.common.records import ledger
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle.trajectory_accounting import (
    VIOLATIONS,
    compute_account,
    format_violations,
)
from meshrl.directory import job_file
from meshrl.directory.directory_paths import require_run
from meshrl.view.history.blocked_jobs import UnpausedClock
from meshrl.view.recording.run_record import RecordEnd, list_corrupt_files, read_events, read_job
from meshrl.view.terminal import Console

UNRECORDED_GRACE_MS = 10_000  # a group is in the ledger so soon after its admission

ACCOUNT_TERMS = {
    "opened": "trajectories admitted",
    "trained": "in exactly one optimizer step of the final lineage",
    "filtered": "consumed by a step; their groups had no reward variance",
    "stale_requeued": "older than the staleness bound; their prompts were requeued",
    "host_lost": "their host or environment was lost; their prompts were requeued",
    "typed_drops": "a tool, reward or rollout failed permanently",
    "in_flight": "no outcome yet",
    **VIOLATIONS,
}


def audit_run(run_dir: Path) -> dict[str, Any]:
    """Return the account of a run, from its record alone; a correct run has 0 for each `WRONG`
    term.

    Raises Refused when the records of groups under way are on another host.
    """
    events = read_events(run_dir)
    try:
        job = read_job(run_dir)[0]
    except CorruptData:  # its events name the job as well
        named = (str(e.fields["job"]) for e in events if e.kind == "opened")
        if not (job := next(named, "")):
            raise
    url = ""  # source of a downloaded run that was not resumed here
    if _read_closed_count(run_dir, events) is None and not (run_dir / "mesh").is_dir():
        with suppress(CorruptData, FileNotFoundError):
            url = str(
                job_file.read_job_file(run_dir / job_file.JOB_FILE_NAME).get(
                    job_file.SOURCE_URL_KEY, ""
                )
            )
    if url:
        raise Refused(
            f"the run at {url} had not ended at its last copy: the records of its groups in "
            "flight are on its run host",
            fix="Audit it on that host; or, after it has ended, move this directory away and "
            "audit the URL",
        )
    return account_for_run(run_dir, events, job)


def account_for_run(run_dir: Path, events: list[Event], job: str) -> dict[str, Any]:
    """Return the account for a job and events that are known already."""
    counted: dict[str, Any] = compute_account(events, count_in_flight(run_dir, events, job), job)
    return counted


def describe_wrong_account(run_dir: Path, discrepancy: str) -> str:
    """Return the message about a run whose account is wrong."""
    return (
        f"the account of {run_dir.name} is wrong: {discrepancy}. Do not rely on steps trained "
        f"since then. Keep {run_dir} unchanged and check `damaged` and `restored` in its "
        "events.jsonl. Start over with `meshrl run JOB`, or resume an earlier copy"
    )


def count_in_flight(run_dir: Path, events: list[Event], job: str) -> int:
    """Count trajectories without a fate, from the rows of groups when the mesh stopped cleanly.

    After a crash they are counted from the ledger and the events of each group.
    """
    if (marked := _read_closed_count(run_dir, events)) is not None:
        return marked
    return sum(find_open_groups(events, job, read_ledger_groups(run_dir / "ledger")).values())


def _read_closed_count(run_dir: Path, events: list[Event]) -> int | None:
    """Return trajectories in flight of a closed record; None if it is open or was cut off."""
    with suppress(CorruptData):
        mark = RecordEnd.read(run_dir)
        if mark is not None and (not events or mark.event == events[-1].id):
            return mark.in_flight
    return None


def read_ledger_groups(directory: Path) -> set[int]:
    """Return the groups in the ledgers below `directory`."""
    shards = {path.parent for path in directory.rglob("*.ledger")}
    return {
        group
        for shard in shards
        for record in ledger.iter_records(shard)
        for group in ledger.extract_groups(record)
    }


def find_open_groups(events: list[Event], job: str, ledger_groups: set[int]) -> dict[int, int]:
    """Return group -> trajectories, of groups whose fate is still open.

    Such groups are finished and not trained (their bytes are in the store), or in the ledger.
    Others have theirs on another host, which reports them when it is lost. Or they were admitted so
    shortly before the end that nothing of them was made; a pause does not count as time.
    """
    opened: dict[int, tuple[int, int]] = {}  # group -> trajectories, when
    ready: set[int] = set()
    elsewhere: set[int] = set()
    given_back: set[int] = set()
    steps: dict[int, set[int]] = {}
    clock, now_ms = UnpausedClock(job), 0
    for event in events:
        fields, now_ms = event.fields, clock.elapsed_ms(event)
        if fields.get("job") != job:
            continue
        match event.kind:
            case "opened":
                opened |= dict.fromkeys(fields["groups"], (fields["samples"], now_ms))
                elsewhere |= set(fields["groups"]) if fields.get("ledger") else set()
            case "ready":
                ready.add(fields["group"])
            case "stale":
                given_back |= {row["group"] for row in fields["groups"]}
            case "requeued" | "dropped":
                given_back.add(fields["group"])
            case "step":
                steps[fields["step"]] = {row["group"] for row in fields["groups"]}
            case "lineage":
                for step, took in steps.items():
                    if fields["version"] < step <= fields.get("lost_through", 0):
                        given_back |= took  # no record of these groups remains
                steps = {step: took for step, took in steps.items() if step <= fields["version"]}
            case "restored":
                opened, steps = {}, {}
            case "history_lost":
                in_flight = fields["in_flight"]
                opened = {row["group"]: (row["samples"], now_ms) for row in in_flight}
                ready = {row["group"] for row in in_flight if row["ready"]}
                given_back = set()
                steps = {
                    row["step"]: {g["group"] for g in row["groups"]} for row in fields["steps"]
                }
    known = ready | ledger_groups | elsewhere
    closed_groups = given_back.union(*steps.values())
    return {
        group: samples
        for group, (samples, ms) in opened.items()
        if group not in closed_groups and (group in known or now_ms - ms < UNRECORDED_GRACE_MS)
    }


def print_audit(run_dir: Path, as_json: bool) -> int:
    """Print the account; return 1 when something was lost or done twice."""
    run_dir = require_run(run_dir)
    for line in list_corrupt_files(run_dir):
        print(f"corrupt: {line}; its readable part is counted", file=sys.stderr)
    counted = audit_run(run_dir)
    if as_json:
        print(json.dumps(counted))
    else:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
        for key, meaning in ACCOUNT_TERMS.items():
            bad = key in VIOLATIONS and counted[key]
            color = "red" if bad else "bold"
            table.add_row(key, Text(str(counted[key]), style=color), meaning)
        Console().print(table)
    if bad := format_violations(counted):
        print(f"error: {describe_wrong_account(run_dir, bad)}", file=sys.stderr)
    return int(bool(bad))
