"""The move that stage times ask for."""

from services.planner.allocation import StageTimes
from services.planner.balancing import rebalance
from services.planner.placement import Decision
from tests.unit.planner.seen import counters, gang, job

CORE = gang(0, "training", desired_core=True)
GANGS = [CORE, gang(1, "rollout"), gang(2, "rollout")]


def test_the_slower_stage_gets_a_gang_and_the_decision_says_why() -> None:
    times = StageTimes(rollout_s=1.0, train_s=4.0)
    details = {
        "policy": "stage_time",
        "from": "rollout",
        "to": "training",
        "rollout_s": 1.0,
        "train_s": 4.0,
        "threshold": 1.15,
        "step": 10,
        "before": {"g0": 3, "g1": 300},
    }
    made = rebalance(times, job(), GANGS, counters(3))
    assert made == Decision("g2", "training", False, "stage_time", details)


def test_stages_in_balance_are_left_alone() -> None:
    assert rebalance(StageTimes(1.0, 1.1), job(), GANGS, []) is None


def test_a_gang_that_is_lost_or_placed_by_hand_is_not_taken() -> None:
    times = StageTimes(rollout_s=1.0, train_s=4.0)
    lost = [*GANGS[:2], gang(2, "rollout", actual_state="lost")]
    assert rebalance(times, job(), lost, []) is None
    by_hand = [CORE, gang(1, "rollout"), gang(2, "rollout", pinned=True)]
    made = rebalance(times, job(), by_hand, [])
    assert made is not None and made.gang == "g1"
