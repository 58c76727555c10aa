"""Who is there: gangs that are missing, lost or gone, and workers that still join."""

from hypothesis import given
from hypothesis import strategies as st

from services.planner.presence import (
    GATHER_S,
    GONE_S,
    LOST_S,
    counted,
    gathering,
    missing_since,
    newly_lost,
    usable,
)
from tests.unit.planner.seen import gang

GANGS = [gang(0), gang(1), gang(2, workers=["worker/g2"], size=2)]


def test_a_gang_is_missing_without_a_worker_or_until_all_have_joined() -> None:
    everyone = {"worker/g0", "worker/g1", "worker/g2"}
    assert missing_since(GANGS, everyone, {}, 7.0) == {"g2": 7.0}
    later = missing_since(GANGS, everyone - {"worker/g1"}, {"g0": 5.0, "g2": 7.0}, 9.0)
    assert later == {"g1": 9.0, "g2": 7.0}


def test_a_gang_is_lost_once_and_only_when_a_lease_is_gone() -> None:
    alive = {"worker/g0", "worker/g2"}
    missing = {"g1": 0.0, "g2": 0.0}
    assert newly_lost(GANGS, alive, missing, LOST_S) == []
    assert newly_lost(GANGS, alive, missing, LOST_S + 1) == ["g1"]
    marked = [gang(1, actual_state="lost")]
    assert newly_lost(marked, alive, missing, LOST_S + 1) == []
    assert usable([*marked, gang(0)]) == [gang(0)]


def test_a_gang_counts_until_it_is_gone() -> None:
    missing = {"g1": 0.0}
    assert counted(GANGS, missing, GONE_S) == GANGS
    assert counted(GANGS, missing, GONE_S + 1) == [GANGS[0], GANGS[2]]


def test_workers_of_a_new_mesh_are_waited_for() -> None:
    assert gathering(GANGS, 4, GATHER_S - 1)
    assert not gathering(GANGS, 3, GATHER_S - 1)
    assert not gathering(GANGS, 4, GATHER_S)


@given(st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=30), st.integers(1, 9))
def test_a_gang_is_lost_when_it_was_away_in_every_look_for_long_enough(
    looks: list[set[int]], every_s: int
) -> None:
    gangs = [gang(number) for number in range(4)]
    missing: dict[str, float] = {}
    for look, there in enumerate(looks):
        alive = {f"worker/g{number}" for number in there}
        missing = missing_since(gangs, alive, missing, look * every_s)
        lost = newly_lost(gangs, alive, missing, look * every_s)
        for number, one in enumerate(gangs):
            away = 0
            while away <= look and number not in looks[look - away]:
                away += 1
            assert (one.id in lost) == ((away - 1) * every_s > LOST_S)
