"""Moves under way, and what the other gangs do meanwhile."""

from common.state.gangs import Moving
from services.planner.moves import finished, progress
from tests.unit.planner.seen import counters, entry, gang

GANGS = [gang(0, "training"), gang(1, "rollout"), gang(2, "training")]


def test_progress_is_what_each_other_gang_has_done() -> None:
    entries = [*counters(3, engines=1), entry("hybrid", "g2", bins=7), entry("engine", "g9")]
    assert progress(GANGS, entries, "g9") == {"g0": 3, "g1": 300, "g2": 7}
    assert progress(GANGS, entries, "g1") == {"g0": 3, "g2": 7}


def test_a_move_is_complete_when_its_gang_does_what_it_was_decided_to_do() -> None:
    move = Moving("g2", 1, 5, {"to": "training", "before": {"g0": 1, "g1": 100, "g8": 2}})
    [(done, told)] = finished([move], GANGS, counters(3, engines=1))
    assert done is move
    assert told == {
        "to": "training",
        "others": {"g0": {"before": 1, "after": 3}, "g1": {"before": 100, "after": 300}},
    }
    starting = [*GANGS[:2], gang(2, "training", actual_state="starting")]
    assert finished([move], starting, []) == []
    redecided = [*GANGS[:2], gang(2, "rollout", epoch=2, actual_epoch=2)]
    assert finished([move], redecided, []) == []


def test_moves_are_told_of_in_the_order_of_their_gangs() -> None:
    moving = [Moving(gang, 1, 5, {}) for gang in ("g2", "g0")]
    assert [move.gang for move, _ in finished(moving, GANGS, [])] == ["g0", "g2"]
