"""Invariants of the virtual mesh: each finds its violation, and a healthy state has none."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
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


def make_healthy_state() -> FinalState:
    """Return a healthy final state: two groups were trained, one is stale, one is ready."""
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
        trained_groups={(0, 1, 1): ObservedGroup(0, 0, -1), (0, 2, 3): ObservedGroup(1, 1, -1)},
        chunks={NAME: CONTENT},
        ledgers={"a.ledger": HEADER + encode_record(RecordKind.CLOSE, [1, "ready"])},
        checkpoints=["step-1", "step-1.json"],
    )


def list_violations(change: Callable[[FinalState], None]) -> list[str]:
    facts = deepcopy(make_healthy_state())
    change(facts)
    return check_invariants(facts, TERMS)


def test_healthy_state_has_no_violation() -> None:
    assert list_violations(lambda facts: None) == []


def train_group_twice(facts: FinalState) -> None:
    facts.events.append(("dropped", {"group": 1}))


def lose_group(facts: FinalState) -> None:
    facts.events.append(("opened", {"groups": [5]}))


def train_unopened_group(facts: FinalState) -> None:
    facts.events.append(("requeued", {"group": 9}))


def count_ended_group_in_flight(facts: FinalState) -> None:
    facts.group_rows[1] = {"state": "ready"}
    facts.groups_by_state["ready"].append(1)


def remove_step(facts: FinalState) -> None:
    facts.job_row["version"] = "3"


def remove_weights(facts: FinalState) -> None:
    facts.chunks.clear()


def exceed_staleness(facts: FinalState) -> None:
    facts.events[3] = step(5, 3)
    facts.trained_groups[0, 5, 3] = ObservedGroup(1, 4, abandoned_above=-1)


def use_foreign_version(facts: FinalState) -> None:
    facts.events[3] = step(5, 3)
    facts.trained_groups[0, 5, 3] = ObservedGroup(4, 4, abandoned_above=1)


def use_later_version(facts: FinalState) -> None:
    facts.trained_groups[0, 2, 3] = ObservedGroup(1, 2, abandoned_above=-1)


def use_unpublished_version(facts: FinalState) -> None:
    facts.trained_groups.clear()


def index_twice(facts: FinalState) -> None:
    facts.groups_by_state["open"].append(4)


def lease_for_ever(facts: FinalState) -> None:
    facts.group_rows[4]["state"] = "leased"
    facts.groups_by_state = {"open": [], "ready": [], "leased": [4]}


def change_chunk(facts: FinalState) -> None:
    facts.chunks[NAME] = b"other"


def add_checkpoints(facts: FinalState) -> None:
    facts.checkpoints = [f"step-{n}{end}" for n in range(4) for end in ("", ".json")]


def tear_checkpoint(facts: FinalState) -> None:
    facts.checkpoints = ["step-1.json"]


def corrupt_ledger(facts: FinalState) -> None:
    content = bytearray(facts.ledgers["a.ledger"])
    content[-1] ^= 1
    facts.ledgers["a.ledger"] = bytes(content)


def leave_lease(facts: FinalState) -> None:
    facts.leases = ["trainer/simulated"]


def leave_process(facts: FinalState) -> None:
    facts.leftovers = ["engine/g0(7) runs"]


def report_defect(facts: FinalState) -> None:
    facts.errors = ["weights(3): KeyError: 'x'"]


def leave_job_unfinished(facts: FinalState) -> None:
    facts.job_row["phase"] = "training"


def finish_late(facts: FinalState) -> None:
    facts.finished_late_s = 1.0


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (train_group_twice, "exactly_once: group 1 ended more than once"),
        (lose_group, "exactly_once: group 5 is lost"),
        (train_unopened_group, "exactly_once: group 9"),
        (count_ended_group_in_flight, "exactly_once: group 1"),
        (remove_step, "whole_steps: version 3"),
        (remove_weights, "whole_steps: the manifest"),
        (exceed_staleness, "staleness: step 5 trained on group 3, 3 versions old"),
        (use_foreign_version, "staleness: step 5 trained on group 3, 3 versions old"),
        (use_later_version, "staleness: step 2 trained on group 3 of a later version"),
        (use_unpublished_version, "staleness: step 1 trained on group 1, which was not observed"),
        (index_twice, "gate: group 4"),
        (lease_for_ever, "gate: groups [4] are leased"),
        (change_chunk, "store: chunk"),
        (add_checkpoints, "store: 4 checkpoints"),
        (tear_checkpoint, "store: checkpoint step-1.json has no directory"),
        (corrupt_ledger, "ledgers: a.ledger has a corrupt record"),
        (leave_lease, "nothing_left: trainer/simulated is still held"),
        (leave_process, "nothing_left: engine/g0(7) runs"),
        (report_defect, "nothing_left: weights(3)"),
        (leave_job_unfinished, "the_end: the job is training"),
        (finish_late, "the_end: it finished 1 s late"),
    ],
)
def test_violation_is_found(change: Callable[[FinalState], None], invariant: str) -> None:
    assert any(line.startswith(invariant) for line in list_violations(change))


def test_strictly_on_policy_step_trains_no_token_of_abandoned_weights() -> None:
    facts = make_healthy_state()
    terms = replace(TERMS, max_staleness=0)
    assert check_invariants(facts, terms) == []
    # Its first tokens are of the trained version; the last ones of an abandoned lineage.
    facts.trained_groups[0, 2, 3] = ObservedGroup(1, 4, abandoned_above=1)
    assert check_invariants(facts, TERMS) == []
    found = check_invariants(facts, terms)
    assert found == ["staleness: step 2 trained on group 3, 1 versions old"]


def test_steps_of_an_abandoned_lineage_are_ignored() -> None:
    def reopen_group(facts: FinalState) -> None:
        facts.events += [("lineage", {"version": 1}), step(2, 3)]

    assert list_violations(reopen_group) == []
