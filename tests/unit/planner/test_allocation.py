"""The stage-time policy against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from common.job.config import PlannerConfig
from services.planner.allocation import Split, StageTimes, growing_role, iteration_s

seconds = st.floats(0.01, 100.0)
gangs = st.integers(1, 8)
CONFIG = PlannerConfig()


@given(seconds, seconds, gangs, gangs)
def test_a_move_shortens_the_iteration_by_at_least_the_gain(
    rollout_s: float, train_s: float, rollout: int, training: int
) -> None:
    times, split = StageTimes(rollout_s, train_s), Split(rollout, training)
    grows = growing_role(times, split, CONFIG)
    if grows is None:
        return
    step = 1 if grows == "training" else -1
    then = Split(split.rollout - step, split.training + step)
    assert then.rollout >= CONFIG.min_rollout and then.training >= 1
    present = max(rollout_s, train_s)
    assert iteration_s(times, split, then) <= present * (1 - CONFIG.gain) + 1e-9


@given(seconds, seconds, gangs, gangs)
def test_moves_end(rollout_s: float, train_s: float, rollout: int, training: int) -> None:
    """Following the policy with times that scale as it assumes never goes back and forth."""
    split = Split(rollout, training)
    seen = set()
    while True:
        assert split not in seen
        seen.add(split)
        times = StageTimes(rollout_s * rollout / split.rollout, train_s * training / split.training)
        grows = growing_role(times, split, CONFIG)
        if grows is None:
            return
        step = 1 if grows == "training" else -1
        split = Split(split.rollout - step, split.training + step)


@given(seconds, gangs, gangs)
def test_balanced_stages_are_left_alone(both_s: float, rollout: int, training: int) -> None:
    assert growing_role(StageTimes(both_s, both_s), Split(rollout, training), CONFIG) is None


def test_the_slower_stage_grows_by_a_gang_of_the_other() -> None:
    assert growing_role(StageTimes(0.3, 1.0), Split(2, 1), CONFIG) == "training"
    assert growing_role(StageTimes(1.0, 0.3), Split(1, 2), CONFIG) == "rollout"


def test_rollout_keeps_its_last_gang_and_training_its_core() -> None:
    assert growing_role(StageTimes(0.1, 9.0), Split(1, 2), CONFIG) is None
    assert growing_role(StageTimes(9.0, 0.1), Split(2, 1), CONFIG) is None


def test_without_times_nothing_moves() -> None:
    assert growing_role(StageTimes(0.0, 1.0), Split(2, 1), CONFIG) is None
