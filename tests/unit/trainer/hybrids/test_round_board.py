"""The board of a step's rounds: every round counts once, whoever computes it and whoever dies."""

from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.trainer.hybrids.round_board import AHEAD, RoundBoard


def board_of(count: int) -> RoundBoard:
    board = RoundBoard()
    board.grow(count)
    board.closed = True
    return board


def test_the_core_and_hybrids_take_from_the_front() -> None:
    board = board_of(4)
    assert board.take(now=0.0) == 0
    assert board.lease("g1", until=5.0) == 1
    assert board.lease("g2", until=5.0) == 2
    assert board.take(now=0.0) == 3
    assert board.take(now=0.0) is None
    assert board.lease("g1", until=5.0) is None


def test_a_lease_that_runs_out_is_computed_by_the_core_and_counts_once() -> None:
    board = board_of(1)
    assert board.lease("g1", until=5.0) == 0
    assert board.take(now=4.0) is None
    assert board.next_expiry() == 5.0
    assert board.take(now=5.0) == 0
    assert board.done(0)
    assert not board.done(0)
    assert board.complete


def test_what_a_hybrid_had_is_free_when_it_leaves() -> None:
    board = board_of(2)
    assert board.lease("g1", until=5.0) == 0
    assert board.release("g1") and not board.release("g1")
    assert board.lease("g2", until=5.0) == 0


def test_a_late_round_goes_before_new_ones_and_nobody_runs_far_ahead_of_it() -> None:
    board = RoundBoard()
    board.grow(50)
    assert board.lease("silent", until=5.0) == 0
    taken = []
    while (index := board.take(now=1.0)) is not None:
        taken.append(index)
        board.done(index)
    assert taken == list(range(1, AHEAD)) and board.lease("g2", until=9.0) is None
    assert board.take(now=5.0) == 0
    board.done(0)
    assert board.take(now=5.0) == AHEAD


def test_a_result_that_cannot_be_kept_is_computed_again() -> None:
    board = board_of(1)
    assert board.lease("g1", until=5.0) == 0
    assert board.claim(0) and not board.claim(0) and not board.complete
    assert board.take(now=9.0) is None
    board.disclaim(0)
    assert board.take(now=1.0) == 0 and board.done(0) and board.complete


def test_nothing_is_complete_before_the_last_round_is_known() -> None:
    board = RoundBoard()
    board.grow(1)
    assert board.take(0.0) == 0 and board.done(0) and not board.complete
    board.grow(1)
    board.closed = True
    assert not board.complete and board.take(0.0) == 1 and board.done(1) and board.complete


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("tldxrg"), st.integers(0, 2))))
def test_any_order_of_events_completes_with_each_round_once(
    count: int, events: list[tuple[str, int]]
) -> None:
    board = RoundBoard()
    board.grow(count)
    out: dict[str, int] = {}
    counted: list[int] = []
    now = 0.0

    def done(index: int) -> None:
        if board.done(index):
            counted.append(index)

    for kind, who in events:
        now += 1.0
        gang = f"g{who}"
        if kind == "l" and gang not in out and (leased := board.lease(gang, now + 3)) is not None:
            out[gang] = leased
        elif kind == "d" and gang in out:
            done(out.pop(gang))
        elif kind == "x":
            out.pop(gang, None)
        elif kind == "r":
            out.pop(gang, None)
            board.release(gang)
        elif kind == "g":
            board.grow(1)
        elif kind == "t" and (taken := board.take(now)) is not None:
            done(taken)
    board.closed = True
    while (taken := board.take(now + 1e9)) is not None:
        done(taken)
    assert board.complete and sorted(counted) == list(range(board.count))
