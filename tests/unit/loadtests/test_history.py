"""Agreement of the history checker and `meshrl audit` on valid and impossible histories."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from loadtests.history.checking import check
from meshrl.common.records.ledger import HEADER, RecordKind, encode_record, make_trajectory_id
from meshrl.common.records.token_records import TokenRows
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle.trajectory_accounting import VIOLATIONS
from meshrl.view.history.job_events import JobEventFilter
from meshrl.view.recording.audit import audit_run, print_audit

SAMPLES = 2
Told = list[tuple[str, dict[str, Any]]]


def open_groups(*groups: int) -> tuple[str, dict[str, Any]]:
    return "opened", {"groups": list(groups), "samples": SAMPLES, "version": 0}


def step(number: int, *groups: int, lineage: int = 0, manifest: str = "") -> Any:
    rows = [{"group": g, "samples": SAMPLES, "scored": 2, "filtered": False} for g in groups]
    manifest = manifest or f"m{lineage}.{number}"
    fields = {"step": number, "version": number, "lineage": lineage, "groups": rows}
    return "step", fields | {"manifest": manifest, "checkpoint": "c"}


def restore_job(lineage: int, version: int, **counts: int) -> tuple[str, dict[str, Any]]:
    zero = dict.fromkeys(("trained", "filtered", "stale_requeued", "typed_drops"), 0)
    return "restored", {"lineage": lineage, "version": version, "counts": zero | counts}


def make_valid_history() -> Told:
    """Make a history in which Redis loses state after the first step, with two groups in flight."""
    ids = 1_000_000_000
    return [
        ("initial", {"lineage": 0, "version": 0, "manifest": "m0.0", "checkpoint": "c"}),
        open_groups(0, 1, 2, 3),
        ("ready", {"group": 0}),
        step(1, 0),
        ("dropped", {"group": 1, "samples": SAMPLES, "failed": 0}),
        restore_job(1, 1, opened=8, trained=2, typed_drops=2, host_lost=4),
        open_groups(ids, ids + 1, ids + 2),
        step(2, ids, lineage=1),
        ("requeued", {"group": ids + 1, "samples": SAMPLES, "failed": 0}),
    ]


def make_events(told: Told, job: str) -> list[Event]:
    """Make the events of a job, one minute apart."""
    every = enumerate(told, 1)
    return [
        Event(f"{n * 60_000}-0", n * 60_000, k, {"job": job} | about) for n, (k, about) in every
    ]


def write(there: Path, job: str, events: list[Event], clean: bool = True) -> Path:
    """Write the record of a run, and its groups in flight if it ended cleanly."""
    (there / "checkpoints").mkdir(parents=True, exist_ok=True)
    (there / "job.json").write_text(json.dumps({"job": job, "document": {}}))
    lines = "".join(json.dumps(asdict(event)) + "\n" for event in events)
    (there / "events.jsonl").write_text(lines)
    mark = {"event": events[-1].id if clean else "", "samples": SAMPLES}
    (there / "in_flight.json").write_text(json.dumps(mark))
    held = {"job": job, "lineage": 0, "step": 1, "weights": "m0.1"}
    (there / "checkpoints/step-000-000001-m0.1.json").write_text(json.dumps(held))
    (there / "ledger/shard-0").mkdir(parents=True, exist_ok=True)
    return there


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Told], Path]:
    return lambda told: write(tmp_path, "j", make_events(told, "j"))


def records(group: int) -> bytes:
    ids = np.array([make_trajectory_id(group, member) for member in range(SAMPLES)])
    tokens = np.arange(SAMPLES, dtype=np.int32)
    rows = TokenRows(ids, np.ones(SAMPLES, np.int32), tokens, np.zeros(SAMPLES, np.float32), tokens)
    text = "a long turn " * 40  # compressible
    return b"".join(
        encode_record(kind, payload)
        for kind, payload in (
            (RecordKind.OPEN, [group, 0, 0, 0, [1, 2]]),
            (RecordKind.TOKENS, rows),
            (RecordKind.TURN, [int(ids[0]), text]),
        )
    )


def test_valid_history_has_the_accounting_of_audit(
    run: Callable[[Told], Path],
) -> None:
    there = run(make_valid_history())
    segment = there / "ledger/shard-0/1-1.ledger"
    segment.write_bytes(HEADER + records(1_000_000_002) + records(3)[:-5])
    found = check(there)
    assert found["problems"] == []
    assert audit_run(there).items() <= found.items()
    assert (found["in_flight"], found["trained"], found["lineage"]) == (2, 4, 1)
    (there / "in_flight.json").unlink()  # as after a crash: the ledger has the groups in flight
    assert audit_run(there).items() <= check(there).items()
    assert check(there)["problems"] == [] and print_audit(there, as_json=True) == 0
    program = [sys.executable, "-m", "loadtests.history", str(there)]
    assert json.loads(subprocess.check_output(program)) == check(there)


def make_history_with_older_checkpoint() -> Told:
    """Make a history in which the checkpoint of version 2 is corrupt. The checkpoint of version 1
    names neither the groups of step 2 nor the dropped group 3; step 3 is recorded.
    """
    back = {"lineage": 1, "version": 1, "manifest": "m0.1", "checkpoint": "c"}
    counts = {"trained": 2, "filtered": 0, "typed_drops": 0}
    return [
        ("initial", {"lineage": 0, "version": 0, "manifest": "m0.0", "checkpoint": "c"}),
        open_groups(0, 1, 2, 3),
        *(("ready", {"group": group}) for group in range(3)),
        *(step(number, number - 1) for number in (1, 2, 3)),
        ("dropped", {"group": 3, "samples": SAMPLES, "failed": 0}),
        ("lineage", back | {"counts": counts, "host_lost": 4, "lost_through": 2}),
        open_groups(4, 5),
        step(2, 4, lineage=1),
        ("dropped", {"group": 5, "samples": SAMPLES, "failed": 0}),
    ]


def test_older_checkpoint_loses_no_known_group(run: Callable[[Told], Path]) -> None:
    there = run(make_history_with_older_checkpoint())
    found = check(there)
    assert found["problems"] == []
    assert audit_run(there).items() <= found.items()
    terms = ("trained", "host_lost", "typed_drops", "in_flight", "lost")
    assert [found[term] for term in terms] == [4, 4, 2, 2, 0]
    (there / "in_flight.json").unlink()
    assert audit_run(there).items() <= check(there).items()
    told = make_history_with_older_checkpoint()
    told[-4][1]["host_lost"] = 2
    assert check(run(told))["lost"] == audit_run(run(told))["lost"] == 2


IDS = 1_000_000_000
DOCTORED: dict[str, Callable[[Told], Told]] = {
    "lost": lambda told: [*told[:-1], open_groups(IDS + 9)],
    "trained_twice": lambda told: [*told, step(3, IDS, lineage=1)],
    "opened_twice": lambda told: [*told, open_groups(3), ("dropped", told[4][1] | {"group": 3})],
    "committed_twice": lambda told: [*told, step(1, lineage=0, manifest="other")],
}


@pytest.mark.parametrize("what", DOCTORED)
def test_impossible_history_is_rejected_by_both(run: Callable[[Told], Path], what: str) -> None:
    there = run(DOCTORED[what](make_valid_history()))
    found, audited = check(there), audit_run(there)
    assert found["problems"] and print_audit(there, as_json=True) == 1
    assert found[what] and {key: found[key] for key in VIOLATIONS} == {
        key: audited[key] for key in VIOLATIONS
    }


def test_files_that_contradict_the_events_are_rejected(run: Callable[[Told], Path]) -> None:
    there = run(make_valid_history())
    (there / "ledger/shard-0/1-1.ledger").write_bytes(HEADER + records(IDS + 7))
    assert check(there)["problems"] == [f"the ledger tells of group {IDS + 7}: nobody opened it"]
    (there / "ledger/shard-0/1-1.ledger").write_bytes(b"another file")
    assert "is no segment" in check(there)["problems"][0]
    there = run([*make_valid_history(), step(4, IDS + 2, lineage=1)])
    assert "step 4 of lineage 1 follows version 2" in str(check(there)["problems"])
    path = there / "checkpoints/step-000-000001-m0.1.json"
    path.write_text(path.read_text().replace("m0.1", "other"))
    assert "holds other, and m0.1 was committed" in str(check(there)["problems"])


MESH: Told = [
    ("gang", {"gang": "g0", "workers": ["w0"], "formed": True, "dissolved": False}),
    ("lost", {"worker": "w0", "reason": "its lease has lapsed"}),
    ("leader", {"election": "planner", "owner": "planner/1", "token": 7}),
    ("services", {"host": "h0", "services": ["rollout/j/0", "rollout/k/0"]}),
]


def add_preemption(told: Told) -> Told:
    """Return the same history of a job that waits first and is paused in the middle."""
    held = [("admission", {"held": held}) for held in ("waiting: workers", "", "paused: k", "")]
    place = [{"gang": "g0", "resident": "g0.0", "role": "rollout", "workers": ["w0"]}]
    seat = [("desired", fields) for fields in place]
    return [held[0], held[1], *seat, *told[:4], held[2], held[3], *told[4:]]


@pytest.mark.parametrize("seed", range(4))
def test_two_jobs_in_one_stream_have_separate_accounting(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    told = {
        "j": add_preemption(make_valid_history()),
        "k": add_preemption(make_history_with_older_checkpoint()),
    }
    turns = [name for name, events in told.items() for _ in events] + [""] * len(MESH)
    random.shuffle(turns)
    left = {"": iter(MESH)} | {name: iter(events) for name, events in told.items()}
    stream = []
    for n, name in enumerate(turns, 1):
        kind, fields = next(left[name])
        stream.append(
            Event(f"{n * 60_000}-0", n * 60_000, kind, fields | ({"job": name} if name else {}))
        )
    for job, alone in told.items():
        there, belonging = tmp_path / job, JobEventFilter(job)
        write(there, job, [event for event in stream if belonging.accept(event)])
        found = check(there)
        assert found["problems"] == []
        assert audit_run(there).items() <= found.items()
        write(tmp_path / "alone", job, make_events(alone, job))
        assert found == check(tmp_path / "alone")


def test_groups_opened_while_the_job_was_being_paused_are_not_lost(tmp_path: Path) -> None:
    told = [*make_valid_history(), ("admission", {"held": "paused: k has priority 1"})]
    events = make_events(told, "j")
    opened_ms = events[-1].ms - 1
    kind, fields = open_groups(IDS + 9)
    events.insert(-1, Event(f"{opened_ms}-0", opened_ms, kind, fields | {"job": "j"}))
    late = events[-1].ms + 600_000
    leads = Event(f"{late}-0", late, "leader", {"election": "planner", "token": 8})
    write(tmp_path, "j", [*events, leads], clean=False)
    (tmp_path / "ledger/shard-0").mkdir(parents=True, exist_ok=True)
    (tmp_path / "ledger/shard-0/1-1.ledger").write_bytes(HEADER + records(IDS + 2))
    assert check(tmp_path)["lost"] == audit_run(tmp_path)["lost"] == 0
    goes_on = Event(f"{late - 300_000}-0", late - 300_000, "admission", {"job": "j", "held": ""})
    write(tmp_path, "j", [*events, goes_on, leads], clean=False)
    assert check(tmp_path)["lost"] == audit_run(tmp_path)["lost"] == SAMPLES
