"""Moves that people ask for."""

import pytest

from common.state.gangs import Gang, Move
from services.planner.placement import Decision
from services.planner.requests import granted, refusal
from tests.unit.planner.seen import gang


@pytest.mark.parametrize(
    ("role", "named", "why"),
    [
        ("training", None, "no gang is called g1"),
        ("serving", gang(1), "choose from rollout, training, idle"),
        ("rollout", gang(1, "training", desired_core=True), "core of training"),
        ("rollout", gang(1, "scoring"), "frozen models"),
        ("rollout", gang(1, size=2), "a gang of 2 workers"),
        ("rollout", gang(1, "rollout"), ""),
        ("idle", gang(1, "training"), ""),
    ],
)
def test_a_move_is_made_or_declined_with_the_reason(
    role: str, named: Gang | None, why: str
) -> None:
    told = refusal(Move("g1", role, "op"), named)
    assert why in told and bool(why) == bool(told)


def test_a_move_that_is_made_says_whose_it_was() -> None:
    details = {"policy": "user", "from": "rollout", "to": "training"}
    made = granted(Move("g1", "training", "op"), gang(1, "rollout"))
    assert made == Decision("g1", "training", False, "user", details)
