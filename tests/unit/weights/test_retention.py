"""Which checkpoints may go."""

from services.weights.retention import expired

NAMES = [f"step-000-{n:06d}" for n in range(6)]


def test_the_committed_checkpoint_and_those_just_before_it_stay() -> None:
    assert expired(NAMES[:5], NAMES[4], keep=3) == NAMES[:2]


def test_a_checkpoint_whose_step_is_being_committed_stays() -> None:
    assert NAMES[5] not in expired(NAMES, NAMES[4], keep=1)


def test_nothing_goes_while_nothing_is_committed() -> None:
    assert expired(NAMES, "", keep=1) == []


def test_the_committed_one_stays_even_if_none_is_asked_for() -> None:
    assert expired(NAMES, NAMES[5], keep=0) == NAMES[:5]
