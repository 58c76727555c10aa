"""Markets of workers: which ones a job takes, how many, and what an hour of them may cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import MarketLimits, PlannedJob
from meshrl.common.state.pool.scheduling.decisions import RejectRequest
from meshrl.common.state.pool.scheduling.feasibility import explain_infeasible
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest, PoolSnapshot
from meshrl.common.state.pool.store.snapshot_documents import decode_snapshot, encode_snapshot
from meshrl.common.state.pool.workers.rows import MARKETS
from meshrl.common.state.pool.workers.settings import PoolSettings
from tests.unit.planner.pools import PlannerBench, awake, job, pool

PRICES = PoolSettings(reserved_price=3.0, lent_price=2.0, spot_price=1.0)


def make_pool(
    markets: Sequence[str], *jobs: PlannedJob, hosts: Sequence[int] = (), **other: Any
) -> PoolSnapshot:
    """Return a pool with workers of these markets, on one host unless `hosts` counts them."""
    snapshot = pool(hosts or [len(markets)], *jobs, **{"settings": PRICES} | other)
    pairs = zip(snapshot.workers, markets, strict=True)
    return replace(snapshot, workers=tuple(replace(w, market=market) for w, market in pairs))


def start(markets: Sequence[str], *jobs: PlannedJob, **other: Any) -> PlannerBench:
    bench = PlannerBench(make_pool(markets, *jobs, **other))
    bench.settle()
    return bench


def count_markets(snapshot: PoolSnapshot, job_id: str) -> Counter[str]:
    """Count the workers of each market on which a job is awake."""
    there = awake(snapshot, job_id)
    return Counter(worker.market for worker in snapshot.workers if worker.id in there)


def test_cores_take_workers_that_stay_and_engines_the_others() -> None:
    bench = start(["spot", "lent", "reserved", "spot", "reserved"], job(max_workers=3))
    assert bench.roles() == {"w0": "rollout", "w2": "core", "w3": "rollout"}


def test_core_of_several_ranks_takes_a_host_that_stays() -> None:
    bench = start(["spot"] * 2 + ["reserved"] * 2, job(ranks=2), hosts=[2, 2])
    assert bench.roles() == {"w0": "rollout", "w1": "rollout", "w2": "core", "w3": "core"}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (MarketLimits(("reserved",)), {"reserved": 2}),
        (MarketLimits(("reserved", "spot")), {"reserved": 2, "spot": 3}),
        (MarketLimits(most_spot=1, most_lent=1), {"reserved": 2, "lent": 1, "spot": 1}),
        (MarketLimits(("spot",)), {"spot": 3}),
        (MarketLimits(max_cost_per_hour=6.0), {"reserved": 1, "spot": 3}),
    ],
)
def test_job_takes_only_workers_within_its_limits(
    limits: MarketLimits, expected: dict[str, int]
) -> None:
    markets = ["spot", "reserved", "lent", "spot", "reserved", "lent", "spot"]
    bench = start(markets, job(markets=limits))
    assert count_markets(bench.snapshot, "job") == expected


def test_engine_of_several_workers_stays_within_the_limits() -> None:
    limits = MarketLimits(most_spot=3)
    bench = start(
        ["reserved"] + ["spot"] * 4,
        job(tensor_parallel=(2,), markets=limits, allows_hybrids=False),
        hosts=[1, 4],
    )
    assert count_markets(bench.snapshot, "job") == {"reserved": 1, "spot": 2}


def test_job_that_takes_few_markets_waits_for_these() -> None:
    first = job("a", markets=MarketLimits(("reserved",)), min_workers=2)
    second = job("b", phase=Phase.QUEUED, submitted_ms=1, markets=MarketLimits(("reserved",)))
    bench = start(["reserved"] * 3 + ["spot"] * 3, first, second)
    assert bench.roles("a") == {"w0": "core", "w1": "rollout"}
    assert bench.roles("b") == {"w0": "core", "w2": "rollout"}, "both cores share a worker"
    tight = replace(PRICES, time_slicing=False)
    bench = start(["reserved"] * 3 + ["spot"] * 3, first, second, settings=tight)
    assert count_markets(bench.snapshot, "b") == {}
    assert "pool.markets: reserved" in bench.snapshot.jobs[1].block_reason
    bench.update_job("b", requirements=replace(second.requirements, markets=MarketLimits()))
    bench.settle()
    assert count_markets(bench.snapshot, "b")["spot"] > 0


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (
            MarketLimits(("reserved",)),
            "pool.markets, 1 of this mesh's 3 workers (1 reserved, 2 spot) remain",
        ),
        (MarketLimits(("spot",), most_spot=1), "pool.workers.most_spot, 1 of"),
        (MarketLimits(max_cost_per_hour=1.5), "pool.max_cost_per_hour, 1 of"),
        (MarketLimits(most_spot=1), ""),
    ],
)
def test_limits_that_leave_too_few_workers_are_named(limits: MarketLimits, expected: str) -> None:
    one = job(markets=limits, can_time_slice=False)
    snapshot = make_pool(["spot", "reserved", "spot"], one)
    found = explain_infeasible(one.requirements, snapshot.workers, PRICES)
    assert expected in found and bool(found) == bool(expected)
    bench = PlannerBench(snapshot)
    for _ in range(2):
        bench.decide_once()
        bench.update(now_ms=bench.snapshot.now_ms + 60_000)
    assert (bench.snapshot.jobs == ()) == bool(expected)


def test_request_for_a_worker_beyond_the_limits_is_rejected() -> None:
    bench = start(["reserved", "reserved", "spot"], job(markets=MarketLimits(("reserved",))))
    bench.update(requests=(PoolRequest("r", "move", "w2", "rollout", "job"),))
    (rejected,) = (d for d in bench.decide_once() if isinstance(d, RejectRequest))
    assert rejected.reason == "job takes no spot workers (pool.markets)"


limits_ = st.builds(
    MarketLimits,
    st.lists(st.sampled_from(MARKETS), min_size=1, unique=True).map(tuple),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, 4.0, 9.0]),
)


@given(
    st.lists(st.sampled_from(MARKETS), min_size=2, max_size=7),
    st.lists(st.tuples(limits_, st.integers(1, 2)), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_no_job_exceeds_its_limits(
    markets: list[str], about: list[tuple[MarketLimits, int]], time_slicing: bool
) -> None:
    jobs = [
        job(f"job{n}", markets=limits, ranks=ranks, submitted_ms=n)
        for n, (limits, ranks) in enumerate(about)
    ]
    there = make_pool(markets, *jobs, settings=replace(PRICES, time_slicing=time_slicing))
    assert decode_snapshot(encode_snapshot(there)) == there
    bench = PlannerBench(there)
    bench.settle(within=30)
    for one in bench.snapshot.jobs:
        limits = one.requirements.markets
        counts = count_markets(bench.snapshot, one.id)
        assert all(counts[market] <= limits.get_most(market) for market in MARKETS)
        cost = sum(getattr(PRICES, f"{market}_price") * n for market, n in counts.items())
        assert not limits.max_cost_per_hour or cost <= limits.max_cost_per_hour


def change_markets(bench: PlannerBench, **markets: str) -> None:
    """Let hosts return with workers of other markets, and settle."""
    changed = (
        replace(worker, market=markets.get(worker.id, worker.market))
        for worker in bench.snapshot.workers
    )
    bench.update(workers=tuple(changed))
    bench.settle()


def test_instances_leave_workers_whose_market_their_job_does_not_take_any_more() -> None:
    limits = MarketLimits(("reserved", "lent"), most_lent=2)
    bench = start(["reserved", "lent", "lent", "reserved"], job(markets=limits, max_workers=3))
    assert count_markets(bench.snapshot, "job") == {"reserved": 1, "lent": 2}
    change_markets(bench, w1="spot")
    assert count_markets(bench.snapshot, "job") == {"reserved": 2, "lent": 1}


def test_only_engine_leaves_an_untaken_market_once_another_worker_is_free() -> None:
    one = job(markets=MarketLimits(("reserved", "lent")), can_time_slice=False)
    bench = start(["reserved", "lent"], one)
    assert bench.roles() == {"w0": "core", "w1": "rollout"}
    change_markets(bench, w1="spot")
    assert bench.roles() == {"w0": "core", "w1": "rollout"}, "it keeps the job running"
    more = make_pool(["reserved", "spot", "lent"], one).workers[2:]
    bench.update(workers=(*bench.snapshot.workers, *more))
    bench.settle()
    assert bench.roles() == {"w0": "core", "w2": "rollout"}


def test_core_leaves_an_untaken_market_after_a_checkpoint() -> None:
    limits = MarketLimits(("reserved", "lent"))
    bench = start(["reserved", "lent"], job(markets=limits, max_workers=2))
    more = make_pool(["reserved", "lent", "reserved"], *bench.snapshot.jobs).workers[2:]
    bench.update(workers=(*bench.snapshot.workers, *more))
    change_markets(bench, w0="spot")
    assert bench.roles() == {"w0": "core", "w1": "rollout"}
    bench.update_job("job", has_checkpoint=True)
    bench.settle()
    assert bench.roles() == {"w1": "rollout", "w2": "core"}
