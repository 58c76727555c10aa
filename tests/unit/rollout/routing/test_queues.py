"""Where trajectories go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.stats import EngineStats
from meshrl.services.rollout.routing.balance import Rebalance, TotalLoad, balance
from meshrl.services.rollout.routing.cache_moves import (
    AGAIN,
    ENOUGH,
    REMEMBERED,
    STEP_TOKENS,
    MoveCosts,
    helpful,
)
from meshrl.services.rollout.routing.lengths import Estimate
from meshrl.services.rollout.routing.queues import (
    EngineLoad,
    LengthBucket,
    QueuedRequest,
    assign,
    bucket_of,
    choose,
    decide,
    next_up,
)

loads = st.lists(
    st.builds(
        EngineLoad,
        name=st.sampled_from([f"engine/g{i}" for i in range(6)]),
        bound=st.integers(1, 8),
        running=st.integers(0, 10),
        version=st.integers(0, 4),
        bucket=st.integers(0, 2),
        seats=st.integers(1, 10),
        held=st.integers(0, 10),
        others=st.integers(0, 4),
    ),
    unique_by=lambda e: e.name,
)
plans = st.lists(
    st.builds(LengthBucket, st.integers(1, 1000), st.integers(1, 64), st.floats(0.1, 1.0)),
    min_size=1,
    max_size=4,
    unique_by=lambda b: b.max_tokens,
).map(lambda buckets: sorted(buckets, key=lambda b: b.max_tokens))


@given(loads, st.integers(0, 4), st.integers(0, 2))
def test_the_least_loaded_engine_with_room_is_chosen_in_the_bucket_before_elsewhere(
    engines: list[EngineLoad], floor: int, bucket: int
) -> None:
    name = choose(engines, QueuedRequest(floor, bucket=bucket))
    fit = {
        e.name: e
        for e in engines
        if e.version >= floor and e.running < e.bound and e.held < e.seats
    }
    if name is None:
        assert not fit
        return
    inside = [e for e in fit.values() if e.bucket == bucket]
    among = inside or list(fit.values())
    assert fit[name] in among
    load = (fit[name].running + fit[name].others) / fit[name].bound
    assert load == min((e.running + e.others) / e.bound for e in among)


@given(loads, st.integers(0, 4))
def test_a_trajectory_stays_where_its_keys_and_values_are_while_that_engine_may_serve(
    engines: list[EngineLoad], floor: int
) -> None:
    for engine in engines:
        chosen = choose(engines, QueuedRequest(floor, engine.name, engine.bucket))
        if engine.version >= floor and engine.running < engine.bound:
            assert chosen == engine.name
        else:
            assert chosen != engine.name


requests = st.lists(
    st.builds(
        QueuedRequest,
        floor=st.integers(0, 4),
        home=st.sampled_from(["", *(f"engine/g{i}" for i in range(6))]),
        bucket=st.integers(0, 2),
    ),
    max_size=8,
)


@given(loads, requests)
def test_room_is_given_while_anybody_waits_who_may_have_it(
    engines: list[EngineLoad], queue: list[QueuedRequest]
) -> None:
    found = next_up(queue, engines)
    if found is None:
        assert all(choose(engines, request) is None for request in queue)
        return
    index, name = found
    engine = next(e for e in engines if e.name == name)
    request = queue[index]
    assert engine.version >= request.floor
    assert engine.running < engine.bound
    assert engine.held < engine.seats or name == request.home


@given(loads, requests)
def test_nobody_is_overtaken_by_one_who_belongs_no_better(
    engines: list[EngineLoad], queue: list[QueuedRequest]
) -> None:
    """The first goes that finds room where it belongs; if none does, the first that finds any."""

    def belongs(request: QueuedRequest, engine: EngineLoad) -> bool:
        if engine.version < request.floor or engine.running >= engine.bound:
            return False
        homes = [e for e in engines if e.name == request.home and e.version >= request.floor]
        if homes:
            return engine.name == request.home
        return engine.bucket == request.bucket and engine.held < engine.seats

    found = next_up(queue, engines)
    well = [i for i, request in enumerate(queue) if any(belongs(request, e) for e in engines)]
    somewhere = [i for i, request in enumerate(queue) if choose(engines, request) is not None]
    if well:
        assert found is not None and found[0] == well[0]
        assert belongs(queue[well[0]], next(e for e in engines if e.name == found[1]))
    elif somewhere:
        assert found is not None and found[0] == somewhere[0]
    else:
        assert found is None


@given(loads, requests)
def test_who_is_next_is_who_the_definition_names(
    engines: list[EngineLoad], queue: list[QueuedRequest]
) -> None:
    """Every request is held against every engine: what `next_up` does without."""

    def defined() -> tuple[int, str] | None:
        for index, request in enumerate(queue):
            may = [e for e in engines if e.version >= request.floor]
            at_home = any(e.name == request.home for e in may)
            fits = [
                e
                for e in may
                if (e.name == request.home and e.running < e.bound)
                or (not at_home and e.bucket == request.bucket and e.room)
            ]
            if fits:
                return index, min(fits, key=lambda e: (e.load, e.held, e.name)).name
        chosen = ((i, choose(engines, request)) for i, request in enumerate(queue))
        return next(((i, name) for i, name in chosen if name is not None), None)

    assert next_up(queue, engines) == defined()


@given(st.dictionaries(st.text("abcdef", min_size=1), st.sampled_from([1, 2, 4, 8])), plans)
def test_every_engine_has_a_bucket_and_small_degrees_serve_short_ones(
    engines: dict[str, int], plan: list[LengthBucket]
) -> None:
    places = assign(engines, plan)
    assert places.keys() == engines.keys()
    order = sorted(engines, key=lambda name: (engines[name], name))
    buckets = [places[name] for name in order]
    assert buckets == sorted(buckets)
    if len(engines) >= len(plan):
        assert set(buckets) == set(range(len(plan)))
    if len(engines) > 1:
        assert buckets[-1] == len(plan) - 1


def test_shares_are_met_as_closely_as_whole_engines_allow() -> None:
    engines = {f"engine/g{i}": 1 for i in range(8)}
    places = assign(engines, [LengthBucket(100, 8, 0.6), LengthBucket(1000, 8, 0.4)])
    assert list(places.values()).count(0) == 5


PLAN = [LengthBucket(100, 32), LengthBucket(1000, 8), LengthBucket(10_000, 4)]


def estimate(mean: float, p90: float) -> Estimate:
    return Estimate(mean, p90, visits=9, depth=2, tree="prompt")


def test_mean_and_tail_must_agree_before_anything_moves() -> None:
    assert decide(None, 1, PLAN).outcome == "tree_node_not_found"
    assert decide(estimate(90, 120), 0, PLAN).outcome == "mean_p90_disagree"
    assert decide(estimate(20, 80), 0, PLAN).outcome == "already_in_target"
    moved = decide(estimate(300, 900), 0, PLAN)
    assert (moved.outcome, moved.bucket) == ("causal_signal_agree", 1)
    assert "9 trajectories went on for 300 tokens on average" in moved.reason


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 2))
def test_a_decision_needs_both_signals(mean: float, p90: float, current: int) -> None:
    decision = decide(estimate(mean, p90), current, PLAN)
    if decision.bucket != current:
        assert bucket_of(mean, PLAN) == bucket_of(p90, PLAN) == decision.bucket
    for tokens, bucket in ((mean, bucket_of(mean, PLAN)), (p90, bucket_of(p90, PLAN))):
        fits = [i for i, b in enumerate(PLAN) if tokens <= b.max_tokens]
        assert bucket == (fits[0] if fits else 2)


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


durations = st.floats(1e-6, 1e4)


def costs(rate: float = 1e4, past: list[float] | None = None, size: int = 1000) -> MoveCosts:
    made = MoveCosts()
    made.published(EngineStats(cache_bytes_per_token=size, prefill_tokens_per_s=rate))
    for first_s in past or []:
        made.moved(first_s)
    return made


@given(st.floats(0, 1e6), st.lists(durations, max_size=40), st.integers(0, 200_000))
def test_it_is_sent_unless_all_is_computed_before_any_can_come(
    rate: float, past: list[float], tokens: int
) -> None:
    made = costs(rate, past)
    choice = helpful(tokens, made)
    if tokens <= STEP_TOKENS:
        assert choice.answer == "recompute"
    elif not rate or len(past) < ENOUGH:
        assert choice.answer == "move"
    else:
        assert made.first_s is not None
        assert (choice.answer == "move") == (tokens / rate > made.first_s)
    assert choice.reason


def test_an_engine_that_takes_nothing_over_is_sent_nothing() -> None:
    assert helpful(100_000, MoveCosts()).answer == "recompute"
    assert helpful(100_000, costs(size=0)).answer == "recompute"
    assert {costs(size=0).choose(100_000).answer for _ in range(2 * AGAIN)} == {"recompute"}


@pytest.mark.parametrize("stalled", [100.0, 1e4])
def test_a_move_that_was_stalled_changes_nothing(stalled: float) -> None:
    made = costs(past=[0.01] * 4 + [stalled])
    assert made.first_s == 0.01


def test_old_moves_are_forgotten_and_empty_ones_say_nothing() -> None:
    made = costs(past=[9.0] * REMEMBERED + [0.01] * REMEMBERED)
    assert made.first_s == 0.01
    made.moved(0.0)
    assert made.first_s == 0.01


def test_what_was_found_useless_is_measured_anew() -> None:
    made = costs(rate=1e6, past=[5.0] * ENOUGH)
    answers = [made.choose(6000).answer for _ in range(2 * AGAIN)]
    assert answers.count("move") == 2 and answers[AGAIN - 1] == "move"
    assert {made.choose(STEP_TOKENS).answer for _ in range(2 * AGAIN)} == {"recompute"}
