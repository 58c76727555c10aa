"""Events of a job: its own, its decisions, and the outcomes of its moves."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import JobPrediction, decode_predictions
from meshrl.view.history import move_outcomes
from meshrl.view.history.decisions import MAX_DECISIONS, format_event, select_decisions
from meshrl.view.history.event_text import format_event as news
from meshrl.view.history.job_events import JobEventFilter
from meshrl.view.live import mesh_tables
from meshrl.view.mesh.process_usage import parse_job

Told = list[tuple[str, dict[str, Any]]]


def desired(job: str, instance: str, *workers: str, role: str = "rollout") -> tuple[str, Any]:
    gang = instance.partition(".")[0]
    return "desired", {
        "gang": gang,
        "resident": instance,
        "job": job,
        "role": role,
        "workers": list(workers),
    }


def make_registration(name: str) -> tuple[str, Any]:
    return "registered", {"name": name, "kind": name.partition("/")[0], "token": 1}


STREAM: Told = [
    desired("a", "g0.0", "w0"),
    desired("b", "g1.0", "w1"),
    ("actual", {"gang": "g1", "resident": "g1.0", "job": "b", "role": "rollout"}),
    make_registration("engine/g0.0"),
    make_registration("engine/g1.0"),
    make_registration("rollout/a/0"),
    make_registration("rollout/b/0"),
    make_registration("trainer/b"),
    make_registration("rank/a/1"),
    make_registration("weights"),
    ("services", {"host": "h0", "services": ["rollout/a/0", "sandbox/a/0"]}),
    ("services", {"host": "h0", "services": ["rollout/b/0"]}),
    ("lost", {"worker": "w1", "reason": "its lease has lapsed"}),
    ("process_ended", {"name": "worker/w1", "why": "signal 9"}),
    ("process_ended", {"name": "rollout/a/0", "why": "signal 9", "job": "a"}),
    ("admission", {"job": "b", "held": "waiting: one worker is needed", "rule": "share"}),
    ("gang", {"gang": "g1", "workers": ["w1"], "dissolved": True, "rule": "lost"}),
    ("leader", {"election": "planner", "owner": "planner/1", "token": 2}),
]


def list_positions(job: str, told: Told, every_ms: int = 10) -> list[int]:
    """List the positions in the stream of the events in the job's record."""
    mine = JobEventFilter(job)
    numbered = enumerate(told)
    events = (Event(f"{n}-0", n * every_ms, kind, fields) for n, (kind, fields) in numbered)
    return [place for place, event in enumerate(events) if mine.accept(event)]


def test_job_has_its_own_events_and_the_meshs() -> None:
    assert list_positions("a", STREAM) == [0, 3, 5, 8, 9, 10, 11, 14, 17]
    assert list_positions("b", STREAM) == [1, 2, 4, 6, 7, 9, 11, 12, 13, 15, 16, 17]
    assert list_positions("c", STREAM) == [9, 17]


def test_lost_worker_concerns_only_the_jobs_on_it() -> None:
    lost = ("lost", {"worker": "w0", "reason": "gone"})
    left = desired("a", "g0.0", "w0", role="idle")
    other = desired("b", "g0.1", "w0")
    assert list_positions("a", [desired("a", "g0.0", "w0"), left, lost]) == [0, 1, 2], (
        "one write told both"
    )
    assert list_positions("a", [desired("a", "g0.0", "w0"), left, lost], every_ms=2_000) == [0, 1]
    assert list_positions("a", [desired("a", "g0.0", "w0"), left, other, lost], every_ms=2_000) == [
        0,
        1,
    ]
    assert list_positions("b", [desired("a", "g0.0", "w0"), left, other, lost]) == [2, 3]
    assert list_positions("a", [desired("a", "g0.0", "w0"), other, lost]) == [0, 2], (
        "both reside on it"
    )


def test_exit_of_a_removed_process_belongs_to_its_job() -> None:
    left = desired("a", "g0.0", "w0", role="idle")
    ended = ("released", {"name": "engine/g0.0", "token": 1})
    assert list_positions("a", [desired("a", "g0.0", "w0"), left, ended], every_ms=9_000) == [
        0,
        1,
        2,
    ]


def test_reopened_record_remembers_earlier_placements() -> None:
    kind, fields = desired("a", "g0.0", "w0")
    mine = JobEventFilter("a", [Event("1-0", 1, kind, fields)])
    lost = Event("2-0", 2, "lost", {"worker": "w0", "reason": "gone"})
    assert mine.accept(lost)
    assert not JobEventFilter("a").accept(lost)


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
def test_process_name_gives_its_job(name: str, job: str) -> None:
    assert parse_job(name) == job


def event(kind: str, number: int = 1, **fields: Any) -> Event:
    return Event(f"{number}-0", number, kind, fields)


def test_only_decisions_about_the_target_are_selected() -> None:
    events = [
        event("admission", job="a", held="waiting: two workers", rule="share", free=1),
        event("admission", job="b", held=""),
        event("desired", gang="g3", job="a", role="rollout", reason="default"),
        event("gang", gang="g3", workers=["w1", "w2"], formed=True, rule="default"),
        event("services", host="here", services=["rollout/a/0", "sandbox/b/0"]),
        event("step", job="a"),  # no decision
        event("host_joined", host="new", workers=2),  # a number
        event("seeding", job="b", seed_ms=1500, rule="seeding"),
    ]
    assert [e.kind for e in select_decisions(events, "new")] == ["host_joined"]
    assert [e.kind for e in select_decisions(events, "b")] == ["admission", "services", "seeding"]
    assert [e.kind for e in select_decisions(events, "a")] == ["admission", "desired", "services"]
    assert [e.kind for e in select_decisions(events, "g3")] == ["desired", "gang"]
    assert [e.kind for e in select_decisions(events, "worker/w2")] == ["gang"]
    assert select_decisions(events, "c") == []


def test_last_decisions_are_kept() -> None:
    events = [event("admission", n, job="a") for n in range(MAX_DECISIONS + 5)]
    assert [e.ms for e in select_decisions(events, "a")] == list(range(5, MAX_DECISIONS + 5))


def test_decision_line_has_rule_and_non_empty_figures() -> None:
    line = format_event(
        event(
            "admission",
            job="a",
            held="",
            rule="share",
            weight=1 / 3,
            floor=0,
            token=7,
            pinned=False,
        )
    )
    assert line.partition(" ")[2] == "admission, rule share: job a, weight 0.3333, floor 0"


def test_desired_state_is_formatted_as_text() -> None:
    fields: dict[str, Any] = {"gang": "g3", "resident": "g3.1", "job": "a", "role": "rollout"}
    fields |= {
        "tier": "accelerator",
        "workers": ["w2"],
        "reason": "share",
        "token": 7,
        "generation": 1,
        "epoch": 1,
    }
    line = format_event(event("desired", entitled=3, **fields))
    assert line.partition(" ")[2] == "a, g3.1: rollout on w2: share (entitled 3)"


FIELDS: dict[str, Any] = {
    "job": "sums",
    "resident": "g2.1",
    "policy": "stage_time",
    "from": "rollout",
    "to": "training",
    "step": 8,
    "before_s": 0.95,
    "predicted_s": 0.81,
    "observed_s": 0.78,
    "expected_s": 0.96,
    "regret_s": 0.0,
    "paid": True,
    "undone": False,
}


def make_outcome(number: int = 1, **fields: Any) -> Event:
    return Event(f"{number}-0", number, "move_judged", FIELDS | fields)


def format_outcomes(*events: Event) -> list[str]:
    out = StringIO()
    Console(file=out, width=200).print(
        mesh_tables.make_moves_table(move_outcomes.list_outcomes(events))
    )
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_last_ten_outcomes_of_a_job_gang_or_instance_are_listed() -> None:
    found = [make_outcome(n) for n in range(12)]
    found += [
        make_outcome(20, job="other", resident="g3.0"),
        Event("21-0", 21, "move", {"gang": "g2"}),
    ]
    assert [move.ms for move in move_outcomes.list_outcomes(found, "sums")] == list(range(2, 12))
    assert [move.ms for move in move_outcomes.list_outcomes(found, "g3")] == [20]
    assert [move.ms for move in move_outcomes.list_outcomes(found, "g3.0")] == [20]
    assert [move.ms for move in move_outcomes.list_outcomes(found)][-1] == 20
    assert move_outcomes.list_outcomes(found, "g30") == []


def test_outcome_row_has_predicted_and_observed_figures() -> None:
    head, paid, undone = format_outcomes(
        make_outcome(),
        make_outcome(paid=False, undone=True, regret_s=0.12, reason="it did not pay in 8 steps"),
    )
    assert head.split() == list(mesh_tables.MOVE_COLUMNS)
    assert paid.partition(" ")[2] == (
        "8 g2 rollout -> training stage_time 0.95 s 0.96 s 0.81 s 0.78 s 0 s paid"
    )
    assert undone.endswith("0.12 s did not pay, undone: it did not pay in 8 steps")


def test_missing_figure_is_a_dash() -> None:
    _, row = format_outcomes(Event("1-0", 1, "move_judged", {"job": "sums", "resident": "g2.1"}))
    assert row.endswith("- - - - - did not pay")


def test_move_outcome_becomes_news() -> None:
    assert news(make_outcome()) == (
        "the move of g2 to training paid: 0.78 s a step, predicted 0.81 s, 0.96 s without it"
    )


def test_prediction_names_the_bottleneck_and_why_no_move_pays() -> None:
    news = JobPrediction(0.81, 0.81, 0.6, 0.0, "latency", "no split is 5 % faster", 0.124)
    assert move_outcomes.describe_prediction(news) == [
        "a step is predicted to take 0.81 s: rollout 0.81 s, training 0.6 s",
        "the bottleneck is latency",
        "the error of predicted moves is 12 % (median)",
        "no split is 5 % faster",
    ]
    assert move_outcomes.describe_prediction(JobPrediction()) == []


def test_planner_memory_with_missing_figures_is_readable() -> None:
    assert decode_predictions({"entitled": {"sums": 2}}) == {}
    news = decode_predictions({"explained": {"sums": {"step_s": 1, "error": None, "more": "?"}}})
    assert news == {"sums": JobPrediction(step_s=1.0)}
