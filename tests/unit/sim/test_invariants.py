"""Each invariant of the virtual mesh finds its violation, and none in what is well."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from meshrl.common.base.digest import compute_digest
from meshrl.common.records.ledger import HEADER, RecordKind, encode_record
from meshrl.sim.mesh.faults.invariants import InvariantLimits, check_invariants
from meshrl.sim.mesh.faults.state_observer import FinalState, ObservedGroup

TERMS = InvariantLimits(steps=2, max_staleness=2, keep_checkpoints=2)
CONTENT = b"weights"
NAME = compute_digest(CONTENT)


def step(number: int, group: int, filtered: bool = False) -> tuple[str, dict[str, Any]]:
    row = {"group": group, "samples": 3, "scored": 3, "filtered": filtered}
    return "step", {"step": number, "lineage": 0, "groups": [row]}


def well() -> FinalState:
    """Four groups: two were trained, one went stale, one is ready."""
    return FinalState(
        events=[
            ("opened", {"groups": [1, 2, 3, 4]}),
            step(1, 1),
            ("stale", {"groups": [{"group": 2}]}),
            step(2, 3),
        ],
        job_row={"phase": "finished", "version": "2", "manifest": NAME},
        group_rows={4: {"state": "ready"}},
        groups_by_state={"open": [], "ready": [4], "leased": []},
        trained_groups={(0, 1, 1): ObservedGroup(0, -1), (0, 2, 3): ObservedGroup(1, -1)},
        chunks={NAME: CONTENT},
        ledgers={"a.ledger": HEADER + encode_record(RecordKind.CLOSE, [1, "ready"])},
        checkpoints=["step-1", "step-1.json"],
    )


def told(change: Callable[[FinalState], None]) -> list[str]:
    facts = deepcopy(well())
    change(facts)
    return check_invariants(facts, TERMS)


def test_what_is_well_breaks_none() -> None:
    assert told(lambda facts: None) == []


def twice(facts: FinalState) -> None:
    facts.events.append(("dropped", {"group": 1}))


def lost(facts: FinalState) -> None:
    facts.events.append(("opened", {"groups": [5]}))


def never_opened(facts: FinalState) -> None:
    facts.events.append(("requeued", {"group": 9}))


def ended_and_in_flight(facts: FinalState) -> None:
    facts.group_rows[1] = {"state": "ready"}
    facts.groups_by_state["ready"].append(1)


def step_missing(facts: FinalState) -> None:
    facts.job_row["version"] = "3"


def weights_missing(facts: FinalState) -> None:
    facts.chunks.clear()


def stale(facts: FinalState) -> None:
    facts.events[3] = step(5, 3)
    facts.trained_groups[0, 5, 3] = ObservedGroup(oldest_version=1, abandoned_above=-1)


def foreign(facts: FinalState) -> None:
    facts.events[3] = step(5, 3)
    facts.trained_groups[0, 5, 3] = ObservedGroup(oldest_version=4, abandoned_above=1)


def unseen(facts: FinalState) -> None:
    facts.trained_groups.clear()


def in_two_indexes(facts: FinalState) -> None:
    facts.groups_by_state["open"].append(4)


def leased_for_ever(facts: FinalState) -> None:
    facts.group_rows[4]["state"] = "leased"
    facts.groups_by_state = {"open": [], "ready": [], "leased": [4]}


def changed_chunk(facts: FinalState) -> None:
    facts.chunks[NAME] = b"other"


def many_checkpoints(facts: FinalState) -> None:
    facts.checkpoints = [f"step-{n}{end}" for n in range(4) for end in ("", ".json")]


def torn_checkpoint(facts: FinalState) -> None:
    facts.checkpoints = ["step-1.json"]


def garbled_ledger(facts: FinalState) -> None:
    content = bytearray(facts.ledgers["a.ledger"])
    content[-1] ^= 1
    facts.ledgers["a.ledger"] = bytes(content)


def lease_left(facts: FinalState) -> None:
    facts.leases = ["trainer/simulated"]


def process_left(facts: FinalState) -> None:
    facts.leftovers = ["engine/g0(7) runs"]


def defect(facts: FinalState) -> None:
    facts.errors = ["weights(3): KeyError: 'x'"]


def unfinished(facts: FinalState) -> None:
    facts.job_row["phase"] = "training"


def late(facts: FinalState) -> None:
    facts.finished_late_s = 1.0


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (twice, "exactly_once: group 1 ended more than once"),
        (lost, "exactly_once: group 5 is lost"),
        (never_opened, "exactly_once: group 9"),
        (ended_and_in_flight, "exactly_once: group 1"),
        (step_missing, "whole_steps: version 3"),
        (weights_missing, "whole_steps: the manifest"),
        (stale, "staleness: step 5 trained on group 3, 3 versions old"),
        (foreign, "staleness: step 5 trained on group 3, 3 versions old"),
        (unseen, "staleness: step 1 trained on group 1, which nobody saw"),
        (in_two_indexes, "gate: group 4"),
        (leased_for_ever, "gate: groups [4] are leased"),
        (changed_chunk, "store: chunk"),
        (many_checkpoints, "store: 4 checkpoints"),
        (torn_checkpoint, "store: checkpoint step-1.json has no directory"),
        (garbled_ledger, "ledgers: a.ledger holds a record"),
        (lease_left, "nothing_left: trainer/simulated is still held"),
        (process_left, "nothing_left: engine/g0(7) runs"),
        (defect, "nothing_left: weights(3)"),
        (unfinished, "the_end: the job is training"),
        (late, "the_end: it was 1 s late"),
    ],
)
def test_a_violation_is_found(change: Callable[[FinalState], None], invariant: str) -> None:
    assert any(line.startswith(invariant) for line in told(change))


def test_steps_of_an_abandoned_lineage_count_for_nothing() -> None:
    def reopened(facts: FinalState) -> None:
        facts.events += [("lineage", {"version": 1}), step(2, 3)]

    assert told(reopened) == []
