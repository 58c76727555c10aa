"""Load test of user mistakes: clear and unclear error messages."""

from __future__ import annotations

from dataclasses import replace

from loadtests.mistakes.__main__ import attempt
from loadtests.mistakes.mistake import ALL
from loadtests.mistakes.preparing import PREPARATIONS

WRONG_TYPE = next(m for m in ALL if m.name == "job: wrong type")


def test_reported_mistake_is_clear_and_destroys_nothing() -> None:
    verdict = attempt(WRONG_TYPE)
    assert verdict.said_s is not None
    assert not verdict.missing and not verdict.faults and not verdict.destroyed


def test_missing_words_and_exit_status_0_are_detected() -> None:
    verdict = attempt(replace(WRONG_TYPE, says=("elephants",), argv=("--help",)))
    assert verdict.silent and not verdict.clear
    assert verdict.missing == ("elephants",)
    assert verdict.faults == ("exit status 0",)


def test_at_least_seventy_mistakes_have_unique_names() -> None:
    assert len({mistake.name for mistake in ALL}) == len(ALL) >= 70
    assert all(mistake.says for mistake in ALL)
    assert {mistake.prepare[0] for mistake in ALL if mistake.prepare} == PREPARATIONS.keys()
