"""What people are shown of moves: predicted, observed, regret, and why none is made now."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.explained import Explained, explained_of
from meshrl.view.history import moves
from meshrl.view.history.news import told
from meshrl.view.live import tables

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


def event(number: int = 1, **fields: Any) -> Event:
    return Event(f"{number}-0", number, "move_judged", FIELDS | fields)


def printed(*events: Event) -> list[str]:
    out = StringIO()
    Console(file=out, width=200).print(tables.moves(moves.judged(events)))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_the_last_ten_judged_moves_of_a_job_a_gang_or_a_resident_are_found() -> None:
    found = [event(n) for n in range(12)]
    found += [event(20, job="other", resident="g3.0"), Event("21-0", 21, "move", {"gang": "g2"})]
    assert [move.ms for move in moves.judged(found, "sums")] == list(range(2, 12))
    assert [move.ms for move in moves.judged(found, "g3")] == [20]
    assert [move.ms for move in moves.judged(found, "g3.0")] == [20]
    assert [move.ms for move in moves.judged(found)][-1] == 20
    assert moves.judged(found, "g30") == []


def test_a_row_has_what_was_predicted_and_what_came_of_it() -> None:
    head, paid, undone = printed(
        event(), event(paid=False, undone=True, regret_s=0.12, reason="it did not pay in 8 steps")
    )
    assert head.split() == list(tables.MOVE_COLUMNS)
    assert paid.partition(" ")[2] == (
        "8 g2 rollout -> training stage_time 0.95 s 0.96 s 0.81 s 0.78 s 0 s paid"
    )
    assert undone.endswith("0.12 s did not pay, undone: it did not pay in 8 steps")


def test_what_an_event_does_not_tell_is_a_dash() -> None:
    _, row = printed(Event("1-0", 1, "move_judged", {"job": "sums", "resident": "g2.1"}))
    assert row.endswith("- - - - - did not pay")


def test_what_came_of_a_move_is_news_of_the_run() -> None:
    assert told(event()) == (
        "the move of g2 to training paid: 0.78 s a step, predicted 0.81 s, 0.96 s without it"
    )


def test_the_present_is_told_with_what_binds_and_why_nothing_moves() -> None:
    told = Explained(0.81, 0.81, 0.6, 0.0, "latency", "no split is 5 % faster", 0.124)
    assert moves.present(told) == [
        "a step is predicted to take 0.81 s: rollout 0.81 s, training 0.6 s",
        "what binds is latency",
        "predictions of moves were off by 12 % (median)",
        "no split is 5 % faster",
    ]
    assert moves.present(Explained()) == []


def test_a_memory_that_says_nothing_of_a_job_or_of_a_figure_is_read() -> None:
    assert explained_of({"entitled": {"sums": 2}}) == {}
    told = explained_of({"explained": {"sums": {"step_s": 1, "error": None, "more": "?"}}})
    assert told == {"sums": Explained(step_s=1.0)}
