"""Counting what is in flight when a run ended without the chance to say so."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.files import lines
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.run.session import status
from meshrl.view.recording.audit import audit, show, without_fate

LATE_MS = 60_000


def story(*told: tuple[int, str, dict[str, Any]]) -> list[Event]:
    return [
        Event(f"{n}-0", ms, kind, {"job": "j"} | fields)
        for n, (ms, kind, fields) in enumerate(told)
    ]


def opened(ms: int, *groups: int) -> tuple[int, str, dict[str, Any]]:
    return ms, "opened", {"groups": list(groups), "samples": 4}


def step(number: int, *groups: int) -> tuple[int, str, dict[str, Any]]:
    return LATE_MS, "step", {"step": number, "groups": [{"group": g} for g in groups]}


def test_finished_groups_that_no_step_took_are_in_flight() -> None:
    told = story(
        opened(0, 1, 2), (1, "ready", {"group": 1}), (2, "ready", {"group": 2}), step(1, 1)
    )
    assert without_fate(told, "j", set()) == {2: 4}


def test_groups_of_the_ledger_are_in_flight_until_their_fate_is_told() -> None:
    told = story(opened(0, 1, 2, 3), (LATE_MS, "dropped", {"group": 3}))
    assert without_fate(told, "j", {1, 2, 3}) == {1: 4, 2: 4}


def test_a_group_that_neither_the_ledger_nor_an_event_knows_is_lost_unless_it_is_brand_new() -> (
    None
):
    told = story(opened(0, 1), opened(LATE_MS - 10, 2), step(1))
    assert without_fate(told, "j", set()) == {2: 4}


def test_groups_of_an_abandoned_step_are_in_flight_again() -> None:
    told = story(
        opened(0, 1, 2),
        (1, "ready", {"group": 1}),
        (1, "ready", {"group": 2}),
        step(1, 1),
        step(2, 2),
        (LATE_MS, "lineage", {"version": 1}),
    )
    assert without_fate(told, "j", set()) == {2: 4}


def test_a_restored_job_begins_without_groups() -> None:
    told = story(opened(LATE_MS, 1), (LATE_MS, "restored", {"counts": {}}))
    assert without_fate(told, "j", {1}) == {}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("", [opened(0, 1), step(1, 1)]),
        ("lost", [opened(0, 1, 2), step(1, 1)]),
        ("trained_twice", [opened(0, 1), step(1, 1), step(2, 1)]),
        ("opened_twice", [opened(0, 1), step(1, 1), opened(LATE_MS, 1)]),
    ],
)
def test_an_account_that_is_wrong_fails_the_run_and_says_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, told: list[Any]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"job": "j", "document": {}}))
    rows = [asdict(event) for event in story(*told)]
    for row in rows:
        for group in row["fields"]["groups"] if row["kind"] == "step" else []:
            group.update(samples=4, scored=4, filtered=False)
    written = b"".join(lines.line(row, number) for number, row in enumerate(rows))
    (tmp_path / "events.jsonl").write_bytes(written)
    assert show(tmp_path, as_json=True) == (1 if what else 0)
    said = capsys.readouterr().err
    found = audit(tmp_path)
    assert status(found, Phase.FINISHED, gave_up=False) == (1 if what else 0)
    assert status(found, Phase.STOPPED, gave_up=False) == (1 if what else 130)
    if what:
        assert found[what] and f"{what} = {found[what]}" in said and "start over" in said
