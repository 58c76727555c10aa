"""The command that says what would be decided, and looks as documents."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, get_args

import pytest
from hypothesis import given, settings

from meshrl.common.base.errors import Refused
from meshrl.common.state.pool.placing.decisions import Decision
from meshrl.common.state.pool.store.reading import snapshot_document, snapshot_of
from meshrl.services.planner.explain import kind_of
from tests.load import scaled
from tests.unit.planner.pools import job, pool
from tests.unit.planner.test_many_jobs import looks_at, pools

LOOK = {
    "now_ms": 60_000,
    "workers": [{"id": f"w{n}", "host": "a", "accelerator": "cpu:0", "token": n} for n in range(2)],
    "jobs": [{"id": "first", "phase": "queued"}, {"id": "second", "phase": "queued"}],
}


DECISIONS = [
    *("form", "dissolve", "place", "remove", "lose", "hostgone", "admit", "failjob", "serve"),
    *("finish", "decline", "judge"),
]


def explained(look: dict[str, Any]) -> str:
    """What the command prints about a look."""
    return subprocess.run(
        [sys.executable, "-m", "meshrl.services.planner.explain"],
        input=json.dumps(look),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=True,
    ).stdout


@given(pools)
@settings(max_examples=15, deadline=None)
def test_a_look_is_read_back_as_it_was_written(drawn: tuple[Any, ...]) -> None:
    looks = looks_at(drawn)
    looks.settle()
    document = json.loads(json.dumps(snapshot_document(looks.snapshot)))
    assert snapshot_of(document) == looks.snapshot


def test_what_a_look_lacks_is_named() -> None:
    document = snapshot_document(pool([1], job()))
    document["workers"][0]["colour"] = "red"
    with pytest.raises(Refused, match=r"workers\[0\] has no colour"):
        snapshot_of(document)
    with pytest.raises(Refused, match="now_ms"):
        snapshot_of({"workers": []})


def test_the_names_of_decisions_in_json_do_not_change() -> None:
    kinds = get_args(Decision)
    assert [kind_of(kind.__new__(kind)) for kind in kinds] == DECISIONS


def test_each_decision_is_told_with_its_rule_and_figures() -> None:
    told = explained(LOOK)
    assert "place g0.0: core of first on g0 in accelerator  [default entitled=1]" in told
    assert "place g1.1: rollout of second on g1 in accelerator by turns" in told
    assert told.count("form g") == 2


def test_why_a_service_is_nowhere_is_told_whether_or_not_something_is_decided() -> None:
    look = LOOK | {
        "hosts": [{"name": "a", "takes": ["shards"]}, {"name": "b", "takes": [], "alive": False}],
        "jobs": [
            {"id": "first", "phase": "training", "need": {"sandboxes": 2}},
            {"id": "second", "phase": "training"},
        ],
    }
    told = explained(look)
    assert told.splitlines()[-1] == (
        "nowhere sandbox/first/0, sandbox/first/1: no host takes its sandboxes now: "
        "a takes shards; b takes no services"
    )
    assert "hold first: paused: no host takes its sandboxes now" in told
    assert "rollout/second/0" not in told.splitlines()[-1]
