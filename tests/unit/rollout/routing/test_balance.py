"""What changes engine while it waits or runs."""

from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.rollout.routing.balance import Rebalance, TotalLoad, balance

engines = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 6), st.integers(0, 8)),
    min_size=1,
    max_size=5,
).map(
    lambda rows: [
        TotalLoad(f"engine/g{i}", bound, min(running, bound), pending, plateau, 0)
        for i, (bound, running, pending, plateau) in enumerate(rows)
    ]
)


def after(fleet: list[TotalLoad], moves: list[Rebalance]) -> dict[str, tuple[int, int]]:
    """(executing, pending) of each engine once the moves are done."""
    state = {e.name: [e.executing, e.pending] for e in fleet}
    for move in moves:
        state[move.source][1 if move.pending else 0] -= move.count
        state[move.target][0] += move.count
    return {name: (executing, pending) for name, (executing, pending) in state.items()}


@given(engines)
def test_nothing_waits_where_another_engine_without_queue_has_room(fleet: list[TotalLoad]) -> None:
    moves = balance(fleet, 0)
    state = after(fleet, moves)
    bounds = {e.name: e.bound for e in fleet}
    assert all(
        executing <= bounds[name] and pending >= 0 for name, (executing, pending) in state.items()
    )
    still = sum(pending for _, pending in state.values())
    room = sum(bounds[n] - executing for n, (executing, pending) in state.items() if not pending)
    assert still == 0 or room == 0


@given(engines)
def test_running_requests_leave_only_for_an_idle_engine_and_never_below_the_plateau(
    fleet: list[TotalLoad],
) -> None:
    by_name = {e.name: e for e in fleet}
    for move in balance(fleet, 0):
        if move.pending:
            continue
        source, target = by_name[move.source], by_name[move.target]
        assert not any(e.pending for e in fleet)
        assert target.executing == 0 and source.plateau > 0
        assert source.executing - move.count >= source.plateau
        assert source.executing == max(e.executing for e in fleet)


def makespan(executing: list[int], plateau: int) -> float:
    """Of equal requests on engines that are flat up to a plateau: the fullest decides."""
    return max(max(1.0, n / plateau) for n in executing)


@given(st.integers(1, 6), st.integers(4, 24))
def test_with_one_idle_engine_no_other_split_would_end_sooner(plateau: int, running: int) -> None:
    fleet = [TotalLoad("a", 24, running, 0, plateau, 0), TotalLoad("b", 24, 0, 0, plateau, 0)]
    state = after(fleet, balance(fleet, 0))
    kept, moved = state["a"][0], state["b"][0]
    assert kept + moved == running
    if moved:
        splits = [(kept, running - kept) for kept in range(min(plateau, running), running + 1)]
        assert makespan([kept, moved], plateau) == min(makespan([*s], plateau) for s in splits)
    else:
        assert running - plateau < 2  # not worth a move


def test_engines_with_old_weights_take_no_part() -> None:
    fleet = [TotalLoad("old", 4, 0, 0, 0, version=1), TotalLoad("new", 4, 4, 3, 0, version=2)]
    assert balance(fleet, 2) == []
    assert balance(fleet, 1) == [Rebalance("new", "old", 3, True)]
