"""Routing policies: the engine that a request gets, balancing and cache moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.stats import EngineStats
from meshrl.services.rollout.routing.cache_move_policy import (
    MAX_MOVES,
    MIN_MOVES,
    REMEASURE_AFTER,
    STEP_TOKENS,
    MoveCosts,
    choose_cheaper,
)
from meshrl.services.rollout.routing.length_trees import LengthEstimate
from meshrl.services.rollout.routing.load_balancer import EngineTotalLoad, Rebalance, plan_rebalance
from meshrl.services.rollout.routing.queue_policy import (
    EngineLoad,
    LengthBucket,
    QueuedRequest,
    assign_buckets,
    choose_engine,
    choose_next,
    decide_bucket,
    find_bucket,
)

loads = st.lists(
    st.builds(
        EngineLoad,
        name=st.sampled_from([f"engine/g{i}" for i in range(6)]),
        max_requests=st.integers(1, 8),
        running=st.integers(0, 10),
        version=st.integers(0, 4),
        bucket=st.integers(0, 2),
        slots=st.integers(1, 10),
        used_slots=st.integers(0, 10),
        other_requests=st.integers(0, 4),
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
def test_least_loaded_engine_of_the_bucket_is_chosen_before_others(
    engines: list[EngineLoad], floor: int, bucket: int
) -> None:
    name = choose_engine(engines, QueuedRequest(floor, bucket=bucket))
    fit = {
        e.name: e
        for e in engines
        if e.version >= floor and e.running < e.max_requests and e.used_slots < e.slots
    }
    if name is None:
        assert not fit
        return
    inside = [e for e in fit.values() if e.bucket == bucket]
    among = inside or list(fit.values())
    assert fit[name] in among
    load = (fit[name].running + fit[name].other_requests) / fit[name].max_requests
    assert load == min((e.running + e.other_requests) / e.max_requests for e in among)


@given(loads, st.integers(0, 4))
def test_trajectory_stays_at_its_cache_engine_while_that_may_serve(
    engines: list[EngineLoad], floor: int
) -> None:
    for engine in engines:
        chosen = choose_engine(engines, QueuedRequest(floor, engine.name, engine.bucket))
        if engine.version >= floor and engine.running < engine.max_requests:
            assert chosen == engine.name
        else:
            assert chosen != engine.name


requests = st.lists(
    st.builds(
        QueuedRequest,
        min_version=st.integers(0, 4),
        cache_engine=st.sampled_from(["", *(f"engine/g{i}" for i in range(6))]),
        bucket=st.integers(0, 2),
    ),
    max_size=8,
)


@given(loads, requests)
def test_free_slot_goes_to_an_eligible_request(
    engines: list[EngineLoad], queue: list[QueuedRequest]
) -> None:
    choice = choose_next(queue, engines)
    if choice is None:
        assert all(choose_engine(engines, request) is None for request in queue)
        return
    index, name = choice
    engine = next(e for e in engines if e.name == name)
    request = queue[index]
    assert engine.version >= request.min_version
    assert engine.running < engine.max_requests
    assert engine.used_slots < engine.slots or name == request.cache_engine


@given(loads, requests)
def test_request_is_overtaken_only_by_a_better_match(
    engines: list[EngineLoad], queue: list[QueuedRequest]
) -> None:
    """Check that the first request goes with a slot in its preferred engines, else the first with
    any slot.
    """

    def prefers(request: QueuedRequest, engine: EngineLoad) -> bool:
        if engine.version < request.min_version or engine.running >= engine.max_requests:
            return False
        cache_engines = [
            e
            for e in engines
            if e.name == request.cache_engine and e.version >= request.min_version
        ]
        if cache_engines:
            return engine.name == request.cache_engine
        return engine.bucket == request.bucket and engine.used_slots < engine.slots

    choice = choose_next(queue, engines)
    preferred = [i for i, request in enumerate(queue) if any(prefers(request, e) for e in engines)]
    assignable = [
        i for i, request in enumerate(queue) if choose_engine(engines, request) is not None
    ]
    if preferred:
        assert choice is not None and choice[0] == preferred[0]
        assert prefers(queue[preferred[0]], next(e for e in engines if e.name == choice[1]))
    elif assignable:
        assert choice is not None and choice[0] == assignable[0]
    else:
        assert choice is None


@given(loads, requests)
def test_next_request_matches_brute_force(
    engines: list[EngineLoad], queue: list[QueuedRequest]
) -> None:
    """Compare `choose_next` with every request matched against every engine."""

    def choose_by_brute_force() -> tuple[int, str] | None:
        for index, request in enumerate(queue):
            eligible = [e for e in engines if e.version >= request.min_version]
            has_cache_engine = any(e.name == request.cache_engine for e in eligible)
            candidates = [
                e
                for e in eligible
                if (e.name == request.cache_engine and e.running < e.max_requests)
                or (not has_cache_engine and e.bucket == request.bucket and e.free_slots)
            ]
            if candidates:
                return index, min(
                    candidates, key=lambda e: (e.load_share, e.used_slots, e.name)
                ).name
        chosen = ((i, choose_engine(engines, request)) for i, request in enumerate(queue))
        return next(((i, name) for i, name in chosen if name is not None), None)

    assert choose_next(queue, engines) == choose_by_brute_force()


@given(st.dictionaries(st.text("abcdef", min_size=1), st.sampled_from([1, 2, 4, 8])), plans)
def test_every_engine_has_a_bucket_and_small_ones_serve_short_requests(
    engines: dict[str, int], plan: list[LengthBucket]
) -> None:
    places = assign_buckets(engines, plan)
    assert places.keys() == engines.keys()
    order = sorted(engines, key=lambda name: (engines[name], name))
    buckets = [places[name] for name in order]
    assert buckets == sorted(buckets)
    if len(engines) >= len(plan):
        assert set(buckets) == set(range(len(plan)))
    if len(engines) > 1:
        assert buckets[-1] == len(plan) - 1


def test_shares_are_met_to_the_nearest_engine() -> None:
    engines = {f"engine/g{i}": 1 for i in range(8)}
    places = assign_buckets(engines, [LengthBucket(100, 8, 0.6), LengthBucket(1000, 8, 0.4)])
    assert list(places.values()).count(0) == 5


PLAN = [LengthBucket(100, 32), LengthBucket(1000, 8), LengthBucket(10_000, 4)]


def estimate(mean: float, p90: float) -> LengthEstimate:
    return LengthEstimate(mean, p90, visits=9, depth=2, tree="prompt")


def test_trajectory_moves_only_if_mean_and_tail_agree() -> None:
    assert decide_bucket(None, 1, PLAN).outcome == "tree_node_not_found"
    assert decide_bucket(estimate(90, 120), 0, PLAN).outcome == "mean_p90_disagree"
    assert decide_bucket(estimate(20, 80), 0, PLAN).outcome == "already_in_target"
    moved = decide_bucket(estimate(300, 900), 0, PLAN)
    assert (moved.outcome, moved.bucket) == ("causal_signal_agree", 1)
    assert "9 trajectories continued for 300 tokens on average" in moved.reason


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 2))
def test_move_requires_both_signals(mean: float, p90: float, current: int) -> None:
    decision = decide_bucket(estimate(mean, p90), current, PLAN)
    if decision.bucket != current:
        assert find_bucket(mean, PLAN) == find_bucket(p90, PLAN) == decision.bucket
    for tokens, bucket in ((mean, find_bucket(mean, PLAN)), (p90, find_bucket(p90, PLAN))):
        candidates = [i for i, b in enumerate(PLAN) if tokens <= b.max_tokens]
        assert bucket == (candidates[0] if candidates else 2)


engines = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 6), st.integers(0, 8)),
    min_size=1,
    max_size=5,
).map(
    lambda rows: [
        EngineTotalLoad(f"engine/g{i}", bound, min(running, bound), pending, plateau, 0)
        for i, (bound, running, pending, plateau) in enumerate(rows)
    ]
)


def apply_moves(fleet: list[EngineTotalLoad], moves: list[Rebalance]) -> dict[str, tuple[int, int]]:
    """Return (executing, pending) of each engine after the moves."""
    state = {e.name: [e.running, e.waiting] for e in fleet}
    for move in moves:
        state[move.source][1 if move.waiting else 0] -= move.count
        state[move.target][0] += move.count
    return {name: (executing, pending) for name, (executing, pending) in state.items()}


@given(engines)
def test_no_request_waits_while_another_engine_has_slots(
    fleet: list[EngineTotalLoad],
) -> None:
    moves = plan_rebalance(fleet, 0)
    state = apply_moves(fleet, moves)
    bounds = {e.name: e.max_running for e in fleet}
    assert all(
        executing <= bounds[name] and pending >= 0 for name, (executing, pending) in state.items()
    )
    still = sum(pending for _, pending in state.values())
    room = sum(bounds[n] - executing for n, (executing, pending) in state.items() if not pending)
    assert still == 0 or room == 0


@given(engines)
def test_running_requests_move_only_to_an_idle_engine_and_not_below_the_plateau(
    fleet: list[EngineTotalLoad],
) -> None:
    by_name = {e.name: e for e in fleet}
    for move in plan_rebalance(fleet, 0):
        if move.waiting:
            continue
        source, target = by_name[move.source], by_name[move.target]
        assert not any(e.waiting for e in fleet)
        assert target.running == 0 and source.plateau_batch > 0
        assert source.running - move.count >= source.plateau_batch
        assert source.running == max(e.running for e in fleet)


def makespan(executing: list[int], plateau: int) -> float:
    """Return the load of the fullest of engines with equal requests that are flat up to a
    plateau.
    """
    return max(max(1.0, n / plateau) for n in executing)


@given(st.integers(1, 6), st.integers(4, 24))
def test_split_with_one_idle_engine_is_optimal(plateau: int, running: int) -> None:
    fleet = [
        EngineTotalLoad("a", 24, running, 0, plateau, 0),
        EngineTotalLoad("b", 24, 0, 0, plateau, 0),
    ]
    state = apply_moves(fleet, plan_rebalance(fleet, 0))
    remaining, moved = state["a"][0], state["b"][0]
    assert remaining + moved == running
    if moved:
        splits = [
            (remaining, running - remaining)
            for remaining in range(min(plateau, running), running + 1)
        ]
        assert makespan([remaining, moved], plateau) == min(makespan([*s], plateau) for s in splits)
    else:
        assert running - plateau < 2  # not worth a move


def test_engines_with_old_weights_are_left_out() -> None:
    fleet = [
        EngineTotalLoad("old", 4, 0, 0, 0, version=1),
        EngineTotalLoad("new", 4, 4, 3, 0, version=2),
    ]
    assert plan_rebalance(fleet, 2) == []
    assert plan_rebalance(fleet, 1) == [Rebalance("new", "old", 3, True)]


durations = st.floats(1e-6, 1e4)


def costs(rate: float = 1e4, past: list[float] | None = None, size: int = 1000) -> MoveCosts:
    made = MoveCosts()
    made.update_stats(EngineStats(cache_bytes_per_token=size, prefill_tokens_per_s=rate))
    for first_s in past or []:
        made.record_move(first_s)
    return made


@given(st.floats(0, 1e6), st.lists(durations, max_size=40), st.integers(0, 200_000))
def test_cache_is_moved_unless_recomputing_is_faster(
    rate: float, past: list[float], tokens: int
) -> None:
    made = costs(rate, past)
    choice = choose_cheaper(tokens, made)
    if tokens <= STEP_TOKENS:
        assert choice.action == "recompute"
    elif not rate or len(past) < MIN_MOVES:
        assert choice.action == "move"
    else:
        assert made.first_byte_s is not None
        assert (choice.action == "move") == (tokens / rate > made.first_byte_s)
    assert choice.reason


def test_engine_without_transfer_receives_no_cache() -> None:
    assert choose_cheaper(100_000, MoveCosts()).action == "recompute"
    assert choose_cheaper(100_000, costs(size=0)).action == "recompute"
    assert {costs(size=0).choose_action(100_000).action for _ in range(2 * REMEASURE_AFTER)} == {
        "recompute"
    }


@pytest.mark.parametrize("stalled", [100.0, 1e4])
def test_stalled_move_does_not_change_the_estimate(stalled: float) -> None:
    made = costs(past=[0.01] * 4 + [stalled])
    assert made.first_byte_s == 0.01


def test_old_and_empty_moves_are_ignored() -> None:
    made = costs(past=[9.0] * MAX_MOVES + [0.01] * MAX_MOVES)
    assert made.first_byte_s == 0.01
    made.record_move(0.0)
    assert made.first_byte_s == 0.01


def test_rejected_move_is_measured_again() -> None:
    made = costs(rate=1e6, past=[5.0] * MIN_MOVES)
    answers = [made.choose_action(6000).action for _ in range(2 * REMEASURE_AFTER)]
    assert answers.count("move") == 2 and answers[REMEASURE_AFTER - 1] == "move"
    assert {made.choose_action(STEP_TOKENS).action for _ in range(2 * REMEASURE_AFTER)} == {
        "recompute"
    }
