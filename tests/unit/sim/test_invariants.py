"""Each invariant of the virtual mesh finds its violation, and none in what is well."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from meshrl.common.base.digest import digest_of
from meshrl.common.records.ledger import HEADER, Kind, frame
from meshrl.sim.mesh.faults.invariants import MeshTerms, check
from meshrl.sim.mesh.faults.witness import Facts, WitnessedGroup

TERMS = MeshTerms(steps=2, max_staleness=2, keep_checkpoints=2)
CONTENT = b"weights"
NAME = digest_of(CONTENT)


def step(number: int, group: int, filtered: bool = False) -> tuple[str, dict[str, Any]]:
    row = {"group": group, "samples": 3, "scored": 3, "filtered": filtered}
    return "step", {"step": number, "lineage": 0, "groups": [row]}


def well() -> Facts:
    """Four groups: two were trained, one went stale, one is ready."""
    return Facts(
        events=[
            ("opened", {"groups": [1, 2, 3, 4]}),
            step(1, 1),
            ("stale", {"groups": [{"group": 2}]}),
            step(2, 3),
        ],
        job={"phase": "finished", "version": "2", "manifest": NAME},
        rows={4: {"state": "ready"}},
        indexes={"open": [], "ready": [4], "leased": []},
        trained={(0, 1, 1): WitnessedGroup(0, -1), (0, 2, 3): WitnessedGroup(1, -1)},
        chunks={NAME: CONTENT},
        ledgers={"a.ledger": HEADER + frame(Kind.CLOSE, [1, "ready"])},
        checkpoints=["step-1", "step-1.json"],
    )


def told(change: Callable[[Facts], None]) -> list[str]:
    facts = deepcopy(well())
    change(facts)
    return check(facts, TERMS)


def test_what_is_well_breaks_none() -> None:
    assert told(lambda facts: None) == []


def twice(facts: Facts) -> None:
    facts.events.append(("dropped", {"group": 1}))


def lost(facts: Facts) -> None:
    facts.events.append(("opened", {"groups": [5]}))


def never_opened(facts: Facts) -> None:
    facts.events.append(("requeued", {"group": 9}))


def ended_and_in_flight(facts: Facts) -> None:
    facts.rows[1] = {"state": "ready"}
    facts.indexes["ready"].append(1)


def step_missing(facts: Facts) -> None:
    facts.job["version"] = "3"


def weights_missing(facts: Facts) -> None:
    facts.chunks.clear()


def stale(facts: Facts) -> None:
    facts.events[3] = step(5, 3)
    facts.trained[0, 5, 3] = WitnessedGroup(oldest=1, foreign_above=-1)


def foreign(facts: Facts) -> None:
    facts.events[3] = step(5, 3)
    facts.trained[0, 5, 3] = WitnessedGroup(oldest=4, foreign_above=1)


def unseen(facts: Facts) -> None:
    facts.trained.clear()


def in_two_indexes(facts: Facts) -> None:
    facts.indexes["open"].append(4)


def leased_for_ever(facts: Facts) -> None:
    facts.rows[4]["state"] = "leased"
    facts.indexes = {"open": [], "ready": [], "leased": [4]}


def changed_chunk(facts: Facts) -> None:
    facts.chunks[NAME] = b"other"


def many_checkpoints(facts: Facts) -> None:
    facts.checkpoints = [f"step-{n}{end}" for n in range(4) for end in ("", ".json")]


def torn_checkpoint(facts: Facts) -> None:
    facts.checkpoints = ["step-1.json"]


def garbled_ledger(facts: Facts) -> None:
    content = bytearray(facts.ledgers["a.ledger"])
    content[-1] ^= 1
    facts.ledgers["a.ledger"] = bytes(content)


def lease_left(facts: Facts) -> None:
    facts.leases = ["trainer/simulated"]


def process_left(facts: Facts) -> None:
    facts.left = ["engine/g0(7) runs"]


def defect(facts: Facts) -> None:
    facts.errors = ["weights(3): KeyError: 'x'"]


def unfinished(facts: Facts) -> None:
    facts.job["phase"] = "training"


def late(facts: Facts) -> None:
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
def test_a_violation_is_found(change: Callable[[Facts], None], invariant: str) -> None:
    assert any(line.startswith(invariant) for line in told(change))


def test_steps_of_an_abandoned_lineage_count_for_nothing() -> None:
    def reopened(facts: Facts) -> None:
        facts.events += [("lineage", {"version": 1}), step(2, 3)]

    assert told(reopened) == []
