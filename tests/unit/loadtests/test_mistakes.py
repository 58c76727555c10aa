"""The load test of mistakes tells what is said from what is not."""

from __future__ import annotations

from dataclasses import replace

from loadtests.mistakes.__main__ import attempt
from loadtests.mistakes.mistake import ALL
from loadtests.mistakes.preparing import PREPARATIONS

WRONG_TYPE = next(m for m in ALL if m.name == "job: wrong type")


def test_a_mistake_that_is_told_is_clear_and_destroys_nothing() -> None:
    verdict = attempt(WRONG_TYPE)
    assert verdict.said_s is not None
    assert not verdict.missing and not verdict.faults and not verdict.destroyed


def test_words_that_do_not_come_and_a_status_of_0_are_found() -> None:
    verdict = attempt(replace(WRONG_TYPE, says=("elephants",), argv=("--help",)))
    assert verdict.silent and not verdict.clear
    assert verdict.missing == ("elephants",)
    assert verdict.faults == ("exit status 0",)


def test_there_are_seventy_at_least_with_a_name_each() -> None:
    assert len({mistake.name for mistake in ALL}) == len(ALL) >= 70
    assert all(mistake.says for mistake in ALL)
    assert {mistake.prepare[0] for mistake in ALL if mistake.prepare} == PREPARATIONS.keys()
