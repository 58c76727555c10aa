"""`meshrl audit`: what became of every trajectory, from the run's events and ledger alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common import ledger
from common.state.accounting import account
from common.state.events import Event
from meshrl.places import existing_run, read_json
from meshrl.recorder import job_of, read_events

EXPLAINED = {
    "opened": "trajectories admitted",
    "trained": "in exactly one optimizer step of the final lineage",
    "filtered": "consumed by a step, without variance in their group",
    "stale_requeued": "older than the staleness bound; their prompts went back",
    "host_lost": "their host or environment was lost; their prompts went back",
    "typed_drops": "a tool, reward or rollout failed for good",
    "in_flight": "without a fate yet",
    "lost": "opened and accounted for nowhere",
    "trained_twice": "in more than one step",
}


def audit(run_dir: Path) -> dict[str, Any]:
    """The account of a run; `lost` and `trained_twice` are 0 in a run that is right."""
    events = read_events(run_dir)
    job, _ = job_of(run_dir)
    counted: dict[str, Any] = account(events, in_flight(run_dir, events), job)
    return counted


def in_flight(run_dir: Path, events: list[Event]) -> int:
    """Trajectories without a fate: counted from the rows of groups when the mesh stopped cleanly.

    After a crash they are those that the ledger holds open.
    """
    mark = run_dir / "in_flight.json"
    if mark.is_file():
        held = read_json(mark)
        if not events or held["event"] == events[-1].id:
            return int(held["samples"])
    return sum(ledger.in_flight(run_dir / "ledger").values())


def show(run_dir: Path, as_json: bool) -> int:
    """Prints the account; 1 when a trajectory was lost or trained twice."""
    counted = audit(existing_run(run_dir))
    if as_json:
        print(json.dumps(counted))
    else:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
        for key, meaning in EXPLAINED.items():
            bad = key in ("lost", "trained_twice") and counted[key]
            color = "red" if bad else "bold"
            table.add_row(key, f"[{color}]{counted[key]}[/]", meaning)
        Console().print(table)
    return int(bool(counted["lost"] or counted["trained_twice"]))
