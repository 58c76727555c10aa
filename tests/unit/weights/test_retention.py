"""Which checkpoints may go."""

from typing import Any

from meshrl.common.state.jobs import COUNTS, JobRow
from meshrl.services.weights.keeping.retention import Number, awaited, expired, pinned

NAMES = [f"step-000-{n:06d}" for n in range(6)]


def test_the_committed_checkpoint_and_those_just_before_it_stay() -> None:
    assert expired(NAMES[:5], NAMES[4], keep=3) == NAMES[:2]


def test_a_checkpoint_whose_step_is_being_committed_stays() -> None:
    assert NAMES[5] not in expired(NAMES, NAMES[4], keep=1)


def test_nothing_goes_while_nothing_is_committed() -> None:
    assert expired(NAMES, "", keep=1) == []


def test_the_committed_one_stays_even_if_none_is_asked_for() -> None:
    assert expired(NAMES, NAMES[5], keep=0) == NAMES[:5]


def row(reference: str, lineage: int = 0, version: int = 0, **more: str) -> JobRow:
    document = {
        "models": {"reference": {"path": reference}},
        "training": {"checkpoint_every": 4},
        "budget": {"steps": 10},
    }
    whole: dict[str, Any] = dict.fromkeys(
        ("lineage", "version", "steps_done", "cursor", "admitted", *COUNTS), 0
    )
    text: dict[str, Any] = {
        "id": "j",
        "phase": "training",
        "run_dir": "",
        "checkpoint": "",
        "error": "",
    }
    whole |= {"lineage": lineage, "version": version}
    text |= {"manifest": "now", **more}
    return JobRow(document=document, **text, **whole)


def test_the_current_the_best_and_a_first_version_that_is_the_reference_stay() -> None:
    assert pinned(row("initial", initial_manifest="first", best_manifest="best")) == {
        "now",
        "best",
        "first",
    }


def test_a_first_version_that_nobody_compares_with_may_go() -> None:
    assert pinned(row("", initial_manifest="first")) == {"now"}
    assert pinned(row("initial", manifest="")) == set()


VERSIONS = {f"{lineage}.{n}": Number(lineage, n) for lineage in range(3) for n in range(11)}


def test_staged_versions_and_the_newest_that_a_checkpoint_is_written_of_are_awaited() -> None:
    later = {f"2.{n}" for n in range(11)}
    assert awaited(row("", 1, 6), VERSIONS) == {"1.4", "1.7", "1.8", "1.9", "1.10"} | later
    assert awaited(row("", 1, 8), VERSIONS) == {"1.8", "1.9", "1.10"} | later
    assert awaited(row("", 1, 10), VERSIONS) == {"1.10"} | later, "the last step's is written too"


def test_before_the_first_commit_all_that_was_staged_is_awaited() -> None:
    assert awaited(row("", 0, -1), VERSIONS) == set(VERSIONS)
