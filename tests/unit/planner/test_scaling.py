"""Spot hosts that the planner plans: within all limits, late to go and never with instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.pool.demand.requirements import MarketLimits, PlannedJob
from meshrl.common.state.pool.scheduling.snapshot import PoolHost, PoolSnapshot
from meshrl.common.state.pool.store.snapshot_documents import decode_snapshot, encode_snapshot
from meshrl.common.state.pool.store.spot_scaling import RELEASED, ScalingPlan, decode_scaling_plan
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings, ScalerSettings
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.policies.scaling import plan_scaling
from meshrl.services.planner.pool.draft import PoolDraft
from tests.unit.planner.pools import PlannerBench, job, pool

RELEASE_S = 30.0


def make_settings(**scaler: Any) -> PoolSettings:
    about: dict[str, Any] = {"command": ["provider"], "most": 6, "release_after_s": RELEASE_S}
    return PoolSettings(spot_price=1.0, reserved_price=3.0, scaler=ScalerSettings(**about | scaler))


class ScaledPool:
    """Pool of reserved workers, and a provider whose hosts come and go as planned."""

    def __init__(self, *jobs: PlannedJob, reserved: int = 2, **scaler: Any) -> None:
        self.bench = PlannerBench(pool([reserved], *jobs, settings=make_settings(**scaler)))
        self.bench.settle()
        self.most: Mapping[str, int | None] = {}
        self.plan: ScalingPlan | None = None
        self.hosts_started = 0

    @property
    def spot_hosts(self) -> list[str]:
        return sorted({w.host for w in self.bench.snapshot.workers if w.market == "spot"})

    @property
    def hosts_in_use(self) -> set[str]:
        draft = self.make_draft()
        in_use = (w for w, seats in draft.placements_by_worker.items() if seats)
        return {draft.workers[w].host for w in in_use if draft.workers[w].market == "spot"}

    def make_draft(self) -> PoolDraft:
        return PoolDraft(self.bench.snapshot, self.bench.snapshot.workers)

    def decide(self, after_s: float = 0.5) -> ScalingPlan:
        """Return the plan some seconds later, once the planner has placed instances."""
        snapshot = self.bench.snapshot
        self.change(now_ms=snapshot.now_ms + int(1000 * after_s))
        self.bench.settle()
        self.plan = plan_scaling(self.make_draft(), self.most, self.plan)
        assert self.plan is not None
        return self.plan

    def change(self, **fields: Any) -> None:
        self.bench.snapshot = replace(self.bench.snapshot, **fields)

    def start_hosts(self, count: int, workers: int = 1) -> None:
        """Start spot hosts, as the provider does."""
        snapshot = self.bench.snapshot
        for _ in range(count):
            name, first = f"spot{self.hosts_started}", 10 * (self.hosts_started + 1)
            self.hosts_started += 1
            rows = [
                WorkerRow(f"w{first + i}", name, "cpu:0", first + i, market="spot")
                for i in range(workers)
            ]
            snapshot = replace(
                snapshot,
                workers=(*snapshot.workers, *rows),
                hosts=(*snapshot.hosts, PoolHost(name)),
            )
        self.bench.snapshot = snapshot

    def end_hosts(self, names: set[str]) -> None:
        """End hosts without instances."""
        assert not names & self.hosts_in_use
        snapshot = self.bench.snapshot
        self.change(
            workers=tuple(w for w in snapshot.workers if w.host not in names),
            hosts=tuple(h for h in snapshot.hosts if h.name not in names),
        )

    def drain(self, names: tuple[str, ...]) -> None:
        """Drain exactly these hosts, as the launcher does."""
        hosts = self.bench.snapshot.hosts
        reasons = {name: RELEASED for name in names}
        self.change(hosts=tuple(replace(h, drain_reason=reasons.get(h.name, "")) for h in hosts))

    def follow(self) -> None:
        """Bring the hosts to the plan."""
        assert self.plan is not None
        self.drain(self.plan.release)
        self.end_hosts(set(self.plan.release))
        self.start_hosts(max(0, self.plan.hosts - len(self.spot_hosts)))


def test_pool_without_scaler_has_no_plan() -> None:
    bench = PlannerBench(pool([2], job()))
    bench.settle()
    assert bench.memory.scaling is None and "scaling" not in bench.memory.encode()


def test_measured_demand_is_requested_at_once_and_given_back_late() -> None:
    scaled = ScaledPool(job())
    scaled.most = {"job": 4}
    assert scaled.decide().hosts == 4
    scaled.follow()
    assert scaled.decide().present == 4 and scaled.hosts_in_use == set(scaled.spot_hosts)
    scaled.most = {"job": 1}
    assert scaled.decide().hosts == 4
    assert scaled.decide(RELEASE_S + 1).hosts == 4, "hosts with instances stay"
    assert scaled.plan is not None and not scaled.plan.release


def test_host_is_given_back_after_the_time_without_instances() -> None:
    scaled = ScaledPool(job(max_workers=2))
    scaled.start_hosts(2)
    scaled.most = {"job": 0}
    first = scaled.decide()
    assert (first.hosts, first.present, first.release) == (2, 2, ())
    assert scaled.decide(RELEASE_S - 1).release == ()
    last = scaled.decide(2.0)
    assert (last.hosts, last.release) == (0, ("spot0", "spot1"))
    scaled.follow()
    assert scaled.decide() == ScalingPlan(reason=last.reason, since_ms=first.since_ms)


def test_released_host_is_used_again_when_demand_returns() -> None:
    scaled = ScaledPool(job())
    scaled.start_hosts(1)
    scaled.drain(("spot0",))  # no instance is placed there
    scaled.most = {"job": 0}
    scaled.decide()
    assert scaled.decide(RELEASE_S + 1).release == ("spot0",)
    scaled.most = {"job": 1}
    plan = scaled.decide()
    assert (plan.hosts, plan.release, plan.declined) == (1, (), {})
    assert scaled.decide().release == ()


def test_unmeasured_job_asks_for_one_engine_at_a_time() -> None:
    scaled = ScaledPool(job())
    for expected in (1, 2, 3):
        assert scaled.decide().hosts == expected
        scaled.follow()
    limited = ScaledPool(job(markets=MarketLimits(most_spot=5)))
    assert limited.decide().hosts == 5
    alone = ScaledPool(job(markets=MarketLimits(("reserved",))))
    assert alone.decide().hosts == 0


def test_job_that_cannot_run_asks_for_what_it_lacks() -> None:
    assert ScaledPool(job(ranks=1, min_workers=5)).decide().hosts == 5


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"most_spot": 2}, 2),
        ({"max_cost_per_hour": 9.0}, 3),  # two reserved workers cost 6
        ({"max_cost_per_hour": 5.0}, 0),
    ],
)
def test_demand_is_within_the_jobs_limits(limits: dict[str, Any], expected: int) -> None:
    scaled = ScaledPool(job())
    scaled.change(jobs=(job(markets=MarketLimits(**limits)),))
    scaled.most = {"job": 6}
    plan = plan_scaling(scaled.make_draft(), scaled.most, None)
    assert plan is not None and plan.hosts == expected


def test_demand_is_within_the_scalers_limits_and_the_reason_names_them() -> None:
    scaled = ScaledPool(job(), most=5, workers_per_host=2)
    scaled.most = {"job": 9}
    assert scaled.decide().hosts == 2
    assert scaled.decide().reason == "job wants 9; pool.scaler.most permits 2 hosts"
    budgeted = ScaledPool(job(), workers_per_host=2, max_cost_per_hour=3.5)
    budgeted.most = {"job": 9}
    assert budgeted.decide().hosts == 1
    assert "pool.scaler.max_cost_per_hour permits 1 host" in budgeted.decide().reason


def test_spot_workers_that_no_job_takes_are_not_bought_again_soon() -> None:
    scaled = ScaledPool(job(tensor_parallel=(2,), allows_hybrids=False), reserved=3)
    scaled.most = {"job": 1}  # one worker hosts no engine of two
    assert scaled.decide().hosts == 1
    scaled.follow()
    scaled.decide()
    plan = scaled.decide(RELEASE_S + 1)
    assert plan.declined and "leaves further ones idle" in plan.reason
    plan = scaled.decide(RELEASE_S + 1)
    assert plan.release == ("spot0",) and plan.hosts == 0
    scaled.follow()
    assert scaled.decide(5 * RELEASE_S).hosts == 0
    assert scaled.decide(6 * RELEASE_S).hosts == 1


def test_host_with_a_preemption_notice_is_not_counted() -> None:
    scaled = ScaledPool(job())
    scaled.most = {"job": 2}
    scaled.decide()
    scaled.follow()
    hosts = scaled.bench.snapshot.hosts
    leaving = tuple(
        replace(h, drain_reason="is shutting down" * (h.name == "spot0")) for h in hosts
    )
    scaled.change(hosts=leaving)
    plan = scaled.decide()
    assert (plan.hosts, plan.present) == (2, 1)


def test_plan_is_stored_and_survives_a_leader_and_an_outage() -> None:
    bench = PlannerBench(pool([2], job(), settings=make_settings()))
    bench.settle()
    plan = bench.memory.scaling
    assert plan is not None and plan.hosts == 1
    document = bench.memory.encode()
    assert decode_scaling_plan(document) == plan
    assert PlannerMemory.decode(document).reset_after_outage().scaling == plan
    assert decode_scaling_plan({}) is None
    again = PlannerBench(bench.snapshot, PlannerMemory.decode(document))
    again.settle()
    assert again.memory.scaling is not None and again.memory.scaling.hosts == 1


def test_bound_of_a_job_is_kept_while_the_provider_runs_no_host() -> None:
    for settings_of_pool, is_kept in ((make_settings(), True), (PoolSettings(), False)):
        bench = PlannerBench(pool([2], job(), settings=settings_of_pool))
        bench.settle()
        assert ("job" in bench.memory.seeding) == is_kept


def test_snapshot_with_a_scaler_is_encoded() -> None:
    snapshot = pool([1], settings=make_settings())
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


def test_plan_waits_while_a_mesh_gathers_its_workers() -> None:
    snapshot: PoolSnapshot = pool([2], job(), settings=make_settings())
    young = replace(snapshot, up_since_ms=snapshot.now_ms - 1000)
    kept = ScalingPlan(hosts=3)
    draft = PoolDraft(young, young.workers)
    assert plan_scaling(draft, {"job": 1}, None) is None
    assert plan_scaling(draft, {"job": 1}, kept) == kept


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["demand", "follow", "lose", "start", "wait"]),
            st.integers(0, 9),
        ),
        max_size=12,
    ),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_any_history_keeps_the_limits(
    history: list[tuple[str, int]], per_host: int, most: int
) -> None:
    scaled = ScaledPool(job(), most=most, workers_per_host=per_host)
    before = scaled.decide()
    for action, number in history:
        wait_s = 0.5
        if action == "demand":
            scaled.most = {"job": number}
        elif action == "follow":
            scaled.follow()
        elif action == "lose":
            lost = set(scaled.spot_hosts[: number % 3]) - scaled.hosts_in_use
            scaled.end_hosts(lost)
        elif action == "start":
            scaled.start_hosts(number % 2, per_host)
        else:
            wait_s = number * RELEASE_S / 4
        plan = scaled.decide(wait_s)
        present, in_use = set(scaled.spot_hosts), scaled.hosts_in_use
        assert plan.present == len(present)
        assert set(plan.release) <= present - in_use, "a host with instances is never given back"
        assert len(present) - len(plan.release) <= max(plan.hosts, len(in_use))
        assert plan.hosts >= len(in_use)
        assert plan.hosts <= max(most // per_host, before.hosts, len(present))
        now_ms = scaled.bench.snapshot.now_ms
        for host in plan.release:
            assert now_ms - plan.idle_since_ms[host] >= 1000 * RELEASE_S
        before = plan
