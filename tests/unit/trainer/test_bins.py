"""The board of a step's bins: every bin counts once, whoever computes it and whoever dies."""

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.bins import BinBoard


def test_the_core_takes_from_the_front_and_hybrids_from_the_back() -> None:
    board: BinBoard[str] = BinBoard(4)
    assert board.take(now=0.0) == 0
    assert board.lease("g1", until=5.0) == 3
    assert board.lease("g2", until=5.0) == 2
    assert board.take(now=0.0) == 1
    assert board.take(now=0.0) is None
    assert board.lease("g1", until=5.0) is None


def test_a_lease_that_runs_out_is_computed_by_the_core_and_counts_once() -> None:
    board: BinBoard[str] = BinBoard(1)
    assert board.lease("g1", until=5.0) == 0
    assert board.take(now=4.0) is None
    assert board.next_expiry() == 5.0
    assert board.take(now=5.0) == 0
    assert board.done(0, "a")
    assert not board.done(0, "b")
    assert board.complete and board.in_order() == ["a"]


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("tldx"), st.integers(0, 2))))
def test_any_order_of_events_completes_with_each_bin_once(
    count: int, events: list[tuple[str, int]]
) -> None:
    board: BinBoard[int] = BinBoard(count)
    out: dict[str, int] = {}
    now = 0.0
    for kind, who in events:
        now += 1.0
        gang = f"g{who}"
        if kind == "l" and gang not in out and (leased := board.lease(gang, now + 3)) is not None:
            out[gang] = leased
        elif kind == "d" and gang in out:
            index = out.pop(gang)
            board.done(index, index)
        elif kind == "x":
            out.pop(gang, None)
        elif kind == "t" and (taken := board.take(now)) is not None:
            board.done(taken, taken)
    while (taken := board.take(now + 1e9)) is not None:
        board.done(taken, taken)
    assert board.complete and board.in_order() == list(range(count))
    assert len(board.results) == count
