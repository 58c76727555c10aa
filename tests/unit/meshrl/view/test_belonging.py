"""Two jobs' events lie in one stream, and each job's record holds its own."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.common.state.events import Event
from meshrl.view.history.belonging import Belonging
from meshrl.view.mesh.processes import job_in

Told = list[tuple[str, dict[str, Any]]]


def desired(job: str, resident: str, *workers: str, role: str = "rollout") -> tuple[str, Any]:
    gang = resident.partition(".")[0]
    return "desired", {
        "gang": gang,
        "resident": resident,
        "job": job,
        "role": role,
        "workers": list(workers),
    }


def registered(name: str) -> tuple[str, Any]:
    return "registered", {"name": name, "kind": name.partition("/")[0], "token": 1}


STREAM: Told = [
    desired("a", "g0.0", "w0"),
    desired("b", "g1.0", "w1"),
    ("actual", {"gang": "g1", "resident": "g1.0", "job": "b", "role": "rollout"}),
    registered("engine/g0.0"),
    registered("engine/g1.0"),
    registered("rollout/a/0"),
    registered("rollout/b/0"),
    registered("trainer/b"),
    registered("rank/a/1"),
    registered("weights"),
    ("services", {"host": "h0", "services": ["rollout/a/0", "sandbox/a/0"]}),
    ("services", {"host": "h0", "services": ["rollout/b/0"]}),
    ("lost", {"worker": "w1", "reason": "its lease has lapsed"}),
    ("process_ended", {"name": "worker/w1", "why": "signal 9"}),
    ("process_ended", {"name": "rollout/a/0", "why": "signal 9", "job": "a"}),
    ("admission", {"job": "b", "held": "waiting: one worker is needed", "rule": "share"}),
    ("gang", {"gang": "g1", "workers": ["w1"], "dissolved": True, "rule": "lost"}),
    ("leader", {"election": "planner", "owner": "planner/1", "token": 2}),
]


def of(job: str, told: Told, every_ms: int = 10) -> list[int]:
    """Places in the stream of the events that are in the job's record."""
    mine = Belonging(job)
    numbered = enumerate(told)
    events = (Event(f"{n}-0", n * every_ms, kind, fields) for n, (kind, fields) in numbered)
    return [place for place, event in enumerate(events) if mine.takes(event)]


def test_each_job_has_its_own_events_and_those_of_the_mesh() -> None:
    assert of("a", STREAM) == [0, 3, 5, 8, 9, 10, 11, 14, 17]
    assert of("b", STREAM) == [1, 2, 4, 6, 7, 9, 11, 12, 13, 15, 16, 17]
    assert of("c", STREAM) == [9, 17]


def test_a_worker_that_is_lost_is_news_for_a_job_only_while_it_serves_it() -> None:
    lost = ("lost", {"worker": "w0", "reason": "gone"})
    left = desired("a", "g0.0", "w0", role="idle")
    other = desired("b", "g0.1", "w0")
    assert of("a", [desired("a", "g0.0", "w0"), left, lost]) == [0, 1, 2], "one write told both"
    assert of("a", [desired("a", "g0.0", "w0"), left, lost], every_ms=2_000) == [0, 1]
    assert of("a", [desired("a", "g0.0", "w0"), left, other, lost], every_ms=2_000) == [0, 1]
    assert of("b", [desired("a", "g0.0", "w0"), left, other, lost]) == [2, 3]
    assert of("a", [desired("a", "g0.0", "w0"), other, lost]) == [0, 2], "both reside on it"


def test_the_end_of_a_process_that_was_sent_away_is_still_its_jobs() -> None:
    left = desired("a", "g0.0", "w0", role="idle")
    ended = ("released", {"name": "engine/g0.0", "token": 1})
    assert of("a", [desired("a", "g0.0", "w0"), left, ended], every_ms=9_000) == [0, 1, 2]


def test_a_record_that_is_taken_up_again_knows_what_it_held_before() -> None:
    kind, fields = desired("a", "g0.0", "w0")
    mine = Belonging("a", [Event("1-0", 1, kind, fields)])
    lost = Event("2-0", 2, "lost", {"worker": "w0", "reason": "gone"})
    assert mine.takes(lost)
    assert not Belonging("a").takes(lost)


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("trainer/a", "a"),
        ("scoring/a", "a"),
        ("rank/a/1", "a"),
        ("rollout/a/0", "a"),
        ("sandbox/a/12", "a"),
        ("engine/g0.0", ""),
        ("worker/w0", ""),
        ("planner/0", ""),
        ("weights", ""),
    ],
)
def test_a_process_s_name_tells_its_job(name: str, job: str) -> None:
    assert job_in(name) == job
