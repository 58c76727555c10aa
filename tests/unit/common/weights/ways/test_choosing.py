"""Which way a host takes: the faster one is found, held to what it promised, and left again."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.weights.ways.choosing import GAIN, LEAST_BYTES, LONGEST_REST, REST, Choosing

SIZE = 1 << 30
WAYS = ["pull", "collective"]


def take(choosing: Choosing, rates: dict[str, float], size: int = SIZE) -> str:
    """One version, of which each way brings so many bytes a second; the way that was chosen."""
    choice = choosing.choose(size, WAYS)
    choosing.happened(choice, size, size / rates[choice.way])
    return choice.way


def test_the_plainest_way_is_measured_before_another_is_tried() -> None:
    choosing, rates = Choosing(), {"pull": 1e9, "collective": 3e9}
    assert [take(choosing, rates) for _ in range(6)] == ["pull"] * 2 + ["collective"] * 4
    assert choosing.usual == "collective"
    assert choosing.rates()["collective"] == 3e9


def test_a_change_that_does_not_pay_is_undone_and_tried_ever_more_rarely() -> None:
    choosing, rates = Choosing(), {"pull": 1e9, "collective": 1e9}
    taken = [take(choosing, rates) for _ in range(400)]
    assert taken.count("collective") == 1 and choosing.usual in ("", "pull")
    choosing = Choosing()
    tries = []
    for number in range(2000):
        choice = choosing.choose(SIZE, WAYS)
        if choice.instead_of:
            tries.append(number)
            choosing.failed(choice, "a member was lost")
        else:
            choosing.happened(choice, SIZE, 1.0)
    rests = [later - earlier for earlier, later in pairwise(tries)]
    assert rests[0] == REST + 1 and rests == sorted(rests) and rests[-1] == LONGEST_REST + 1


def test_what_follows_is_told_with_figures() -> None:
    choosing = Choosing()
    for _ in range(2):
        first = choosing.choose(SIZE, WAYS)
        assert choosing.happened(first, SIZE, 2.0) == "it took 2 s"
    assert "not known yet" in first.why
    change = choosing.choose(SIZE, WAYS)
    assert (change.way, change.instead_of, change.otherwise_s) == ("collective", "pull", 2.0)
    assert choosing.happened(change, SIZE, 1.9) == "it took 1.9 s instead of 2 s: undone"
    stays = choosing.choose(SIZE, WAYS)
    assert stays.way == "pull" and stays.predicted_s == 2.0
    assert "1.9 s by collective, which rests for 3 versions more" in stays.why


def test_a_network_that_changes_is_followed() -> None:
    choosing = Choosing()
    for _ in range(10):
        take(choosing, {"pull": 1e9, "collective": 4e9})
    assert choosing.usual == "collective"
    slow = {"pull": 1e9, "collective": 0.1e9}
    taken = [take(choosing, slow) for _ in range(10)]
    assert taken[-1] == "pull" and choosing.usual == "pull"


def test_small_versions_and_single_ways_leave_no_choice() -> None:
    choosing = Choosing()
    for _ in range(5):
        assert take(choosing, {"pull": 1e9, "collective": 9e9}, LEAST_BYTES - 1) == "pull"
    assert not choosing.rates()
    assert "no other way" in choosing.choose(SIZE, ["pull"]).why


@given(
    pull=st.floats(1e7, 1e10),
    collective=st.floats(1e7, 1e10),
    sizes=st.lists(st.integers(LEAST_BYTES, 64 << 30), min_size=40, max_size=60),
)
def test_with_steady_rates_it_ends_within_the_gain_of_the_best_way(
    pull: float, collective: float, sizes: list[int]
) -> None:
    """Beside the one trial, which costs what that way takes."""
    choosing, rates = Choosing(), {"pull": pull, "collective": collective}
    taken = [take(choosing, rates, size) for size in sizes]
    settled = taken[10:]
    best = max(rates, key=lambda way: rates[way])
    if rates[best] * (1 - GAIN) > min(rates.values()) * 1.0001:
        assert set(settled) == {best}
    assert len(set(settled)) == 1
