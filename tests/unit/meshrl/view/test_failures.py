"""Failures as people read them: the first at once, then counts; shares beside figures."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.common.state.events import Event
from meshrl.view.history.failures import AGAIN_S, Heard, ShownFailures, of_share
from meshrl.view.history.run_snapshot import RunHistory, evaluation, snapshot
from meshrl.view.live.view import RunLines, evaluation_line, step_line
from tests.unit.meshrl.view.test_watch import reading, row

WHERE = "digits.py:12 in reward()"


def failure(count: int = 1, **more: Any) -> Event:
    fields = {
        "job": "tiny",
        "kind": "reward raised",
        "text": "ValueError: no",
        "where": WHERE,
        "count": count,
        "calls": 0,
        "evaluation": False,
        "by": "rollout/0",
    }
    return Event("1-0", 1, "failure", fields | more)


def test_the_first_of_each_kind_is_said_at_once_and_then_its_count_with_each_step() -> None:
    heard, told = Heard([failure()]), ShownFailures()
    assert told.news(heard.all, False, 1.0) == [f"reward raised at {WHERE}: ValueError: no"]
    heard.hear(failure(5))
    assert told.news(heard.all, False, 2.0) == []
    assert told.news(heard.all, True, 3.0) == [f"failed so far: reward raised 6 ({WHERE})"]
    assert told.news(heard.all, True, 4.0) == [], "nothing new"
    hung = failure(0, kind="reward timed out", text="reward took more than 5 s", calls=1)
    heard.hear(hung)
    assert told.news(heard.all, False, 5.0)[0].startswith("reward timed out at ")
    heard.hear(hung)
    assert told.news(heard.all, False, 6.0 + AGAIN_S) == [
        f"failed so far: reward timed out 0, 2 calls given up ({WHERE})"
    ], "also where no step comes"


def test_plain_lines_tell_of_failures_and_of_each_steps_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shot = snapshot(reading(10.0, 0.0, failure(3)), RunHistory())
    lines = RunLines()
    lines.show(shot, [])
    assert f"reward raised at {WHERE}: ValueError: no" in capsys.readouterr().out
    assert "  failed 12 %  " in step_line(row(1, failed_share=0.125), shot)
    assert "  failed 0 %  " in step_line(row(1), shot)


def test_a_figure_says_of_which_share_of_its_samples_it_is() -> None:
    assert (of_share(0.4), of_share(1.0), of_share(None)) == (" of 40 %", "", "")
    assert of_share(0.999) == " of 99.9 %"
    some = evaluation(
        {
            "tag": "step-10",
            "step": 10,
            "sampled": 0.361,
            "figures": {"held_out.sampled": 0.361, "more.mean": 0.5},
            "shares": {"held_out.sampled": 0.4, "more.mean": 1.0},
            "reasons": {"reward raised": 154},
        }
    )
    said = "held-out after step 10: 0.361 sampled of 40 %, more.mean 0.500"
    assert evaluation_line(some) == said


def test_an_evaluation_that_loses_everything_says_so() -> None:
    none = evaluation(
        {
            "tag": "before",
            "step": 0,
            "shares": {"held_out.sampled": 0.0, "held_out.greedy": 0.0},
            "reasons": {"reward raised": 512},
        }
    )
    assert evaluation_line(none) == (
        "evaluated after step 0: held_out.sampled, held_out.greedy: no sample was scored "
        "(reward raised 512)"
    )
