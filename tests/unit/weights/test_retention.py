"""Which checkpoints may go."""

from common.state.jobs import COUNTS, JobRow
from services.weights.retention import expired, pinned

NAMES = [f"step-000-{n:06d}" for n in range(6)]


def test_the_committed_checkpoint_and_those_just_before_it_stay() -> None:
    assert expired(NAMES[:5], NAMES[4], keep=3) == NAMES[:2]


def test_a_checkpoint_whose_step_is_being_committed_stays() -> None:
    assert NAMES[5] not in expired(NAMES, NAMES[4], keep=1)


def test_nothing_goes_while_nothing_is_committed() -> None:
    assert expired(NAMES, "", keep=1) == []


def test_the_committed_one_stays_even_if_none_is_asked_for() -> None:
    assert expired(NAMES, NAMES[5], keep=0) == NAMES[:5]


def row(reference: str, **more: str) -> JobRow:
    document = {"models": {"reference": {"path": reference}}}
    whole = dict.fromkeys(("lineage", "version", "steps_done", "cursor", "admitted", *COUNTS), 0)
    times = {"submitted_ms": 0, "phase_ms": 0}
    text = {"id": "j", "phase": "training", "run_dir": "", "checkpoint": "", "error": ""}
    return JobRow(document=document, **text, **whole, **times, **{"manifest": "now", **more})


def test_the_current_the_best_and_a_first_version_that_is_the_reference_stay() -> None:
    assert pinned(row("initial", initial_manifest="first", best_manifest="best")) == {
        "now",
        "best",
        "first",
    }


def test_a_first_version_that_nobody_compares_with_may_go() -> None:
    assert pinned(row("", initial_manifest="first")) == {"now"}
    assert pinned(row("initial", manifest="")) == set()
