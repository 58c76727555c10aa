"""Counting trajectories from events: every one is somewhere, and none twice."""

from __future__ import annotations

from typing import Any

from meshrl.common.state.events import Event
from meshrl.common.state.lifecycle.accounting import WRONG, account, wrong


def story(*told: tuple[str, dict[str, Any]]) -> list[Event]:
    return [
        Event(f"{n}-0", n, kind, {"job": "j"} | fields) for n, (kind, fields) in enumerate(told)
    ]


def opened(*groups: int, samples: int = 4) -> tuple[str, dict[str, Any]]:
    return "opened", {"groups": list(groups), "samples": samples}


def step(number: int, *groups: int, scored: int = 4, filtered: bool = False) -> Any:
    rows = [
        {"group": group, "samples": 4, "scored": scored, "filtered": filtered} for group in groups
    ]
    return "step", {"step": number, "groups": rows}


def test_a_mesh_in_which_nothing_happened_has_lost_nothing() -> None:
    assert set(account([], 0).values()) == {0}


def test_each_end_of_a_group_is_a_term_of_its_own() -> None:
    terms = account(
        story(
            opened(0, 1, 2, 3, 4, 5),
            step(1, 0),
            step(2, 1, filtered=True),
            ("stale", {"groups": [{"group": 2, "samples": 4}]}),
            ("requeued", {"group": 3, "samples": 4}),
            ("dropped", {"group": 4, "samples": 4}),
        ),
        in_flight=4,
    )
    assert terms == {
        "opened": 24,
        "trained": 4,
        "filtered": 4,
        "stale_requeued": 4,
        "host_lost": 4,
        "typed_drops": 4,
        "in_flight": 4,
        "lost": 0,
        "trained_twice": 0,
        "opened_twice": 0,
        "committed_twice": 0,
    }


def test_a_group_that_nobody_accounts_for_is_lost() -> None:
    assert account(story(opened(0, 1), step(1, 0)), in_flight=0)["lost"] == 4


def test_unscored_members_of_a_trained_group_are_typed_drops() -> None:
    terms = account(story(opened(0), step(1, 0, scored=3)), in_flight=0)
    assert (terms["trained"], terms["typed_drops"], terms["lost"]) == (3, 1, 0)


def test_a_group_in_two_steps_is_trained_twice() -> None:
    terms = account(story(opened(0, 1), step(1, 0), step(2, 0)), in_flight=0)
    assert terms["trained_twice"] == 4


def test_steps_of_an_abandoned_lineage_do_not_count() -> None:
    terms = account(
        story(opened(0, 1, 2), step(1, 0), step(2, 1), ("lineage", {"version": 1}), step(2, 1)),
        in_flight=4,
    )
    assert (terms["trained"], terms["lost"], terms["trained_twice"]) == (8, 0, 0)


def test_a_restored_job_begins_with_its_checkpoints_counts() -> None:
    counts = {
        "opened": 8,
        "trained": 4,
        "filtered": 0,
        "stale_requeued": 0,
        "host_lost": 4,
        "typed_drops": 0,
    }
    terms = account(story(opened(9), ("restored", {"counts": counts}), opened(1)), in_flight=4)
    assert (terms["opened"], terms["trained"], terms["lost"]) == (12, 4, 0)


def test_other_jobs_are_left_out_when_one_is_asked_for() -> None:
    told = story(opened(0), ("opened", {"job": "other", "groups": [0], "samples": 2}))
    assert account(told, in_flight=4, job="j")["opened"] == 4
    assert account(told, in_flight=6)["opened"] == 6


def test_a_version_has_one_manifest_in_a_lineage_and_a_group_number_is_given_once() -> None:
    def commit(lineage: int, manifest: str, group: int) -> Any:
        kind, fields = step(1, group)
        return kind, fields | {"lineage": lineage, "manifest": manifest}

    good = story(opened(0, 1, 2), commit(0, "a", 0), ("lineage", {"version": 0}), commit(1, "b", 1))
    assert wrong(account(good, in_flight=8)) == ""
    counts = {"opened": 0, "trained": 0, "filtered": 0, "stale_requeued": 0, "host_lost": 0}
    restored = ("restored", {"version": 0, "counts": counts | {"typed_drops": 0}})
    told = story(opened(0, 1), commit(0, "a", 0), restored, opened(1, 2), commit(0, "b", 1))
    terms = account(told, in_flight=4)
    assert {key: terms[key] for key in WRONG} == {
        "lost": 0,
        "trained_twice": 0,
        "opened_twice": 1,
        "committed_twice": 1,
    }
    assert "opened_twice = 1" in wrong(terms) and "lost" not in wrong(terms)
