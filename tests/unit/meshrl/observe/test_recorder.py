"""What a run's record says was evaluated."""

from __future__ import annotations

from typing import Any

from common.state.events import Event
from meshrl.observe.recorder import evaluated

JOB = "j"


def event(kind: str, **fields: Any) -> Event:
    return Event("1-0", 0, kind, {"job": JOB} | fields)


def judged(step: int, value: float, best: bool) -> Event:
    return event("evaluation", tag=f"step-{step}", step=step, value=value, best=best)


def told(known: list[Event]) -> list[tuple[str, bool]]:
    return [(e.fields["tag"], e.fields["best"]) for e in evaluated(known, JOB)]


def test_evaluations_of_abandoned_versions_do_not_stand() -> None:
    before = [judged(4, 0.5, True), judged(8, 0.25, False), judged(12, 0.25, False)]
    back = event("lineage", lineage=1, version=8)
    assert told(before) == [("step-4", True), ("step-8", False), ("step-12", False)]
    assert told([*before, back]) == [("step-4", True), ("step-8", False)]
    assert told([*before, back, judged(12, 0.75, True)])[-1] == ("step-12", True)
    other = Event("1-0", 0, "lineage", {"job": "other", "lineage": 1, "version": 0})
    assert told([*before, other]) == told(before)


def test_no_earlier_version_is_the_best_when_the_best_one_is_abandoned() -> None:
    known = [judged(4, 0.5, True), judged(12, 0.75, True)]
    assert told([*known, event("lineage", lineage=1, version=8)]) == [("step-4", False)]
