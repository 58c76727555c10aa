"""Random walks of jobs and workers: decisions apply, and no gang in use is dissolved."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.decisions import PlaceInstance, RemoveInstance
from meshrl.common.state.pool.scheduling.feasibility import explain_infeasible
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role, Tier, TierBytes
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.admission.fair_shares import (
    ShareBounds,
    ShareClaim,
    divide_pool,
    fill_shares,
)
from tests.unit.planner.pools import NOW_MS, PlannerBench, job, pool, set_reconciled

STEPS = 30
MEMORY = RoleMemory(core=400, core_state=300, hybrid=200, engines={1: 100})
KINDS = ["comes", "comes", "ends", "dies", "back", "idle", "later", "saved", "saved"]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(100, 124))
def test_decisions_apply_on_random_walks(seed: int) -> None:
    """Check walks that are drawn from a seed; `Looks` applies each decision as Redis would have
    it.
    """
    drawn = random.Random(seed)
    hosts = [drawn.randint(2, 5) for _ in range(drawn.randint(1, 2))]
    about = PoolSettings(gang_scope="network" if seed % 3 == 0 else "host")
    bench = PlannerBench(pool(hosts, job("first", ranks=2), settings=about))
    for number in range(STEPS):
        step(bench, drawn, number, [(1,)])
        bench.decide_once(ready=drawn.random() < 0.8)
    bench.settle(within=40)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(400, 430))
def test_decisions_apply_with_gangs_of_several_jobs(seed: int) -> None:
    """Check random walks in which users place jobs with each other and apart, on workers with
    budgets. `PlannerBench` checks after each pass that no gang has more jobs than the settings
    allow, and that the tiers of each worker hold what shares it.
    """
    drawn = random.Random(seed)
    hosts = [drawn.randint(1, 4) for _ in range(drawn.randint(1, 2))]
    bench = PlannerBench(pool(hosts, settings=PoolSettings(jobs_per_gang=drawn.randint(1, 3))))
    for worker in bench.snapshot.workers:
        tiers = TierBytes(drawn.choice([400, 600, 2000]), drawn.choice([200, 1000]), 500)
        bench.update_worker(worker.id, budget=tiers)
    for number in range(STEPS):
        step(bench, drawn, number, [(1,)], memory=MEMORY)
        ids = [planned.id for planned in bench.snapshot.jobs]
        if ids and drawn.random() < 0.3:
            partner = drawn.choice([*ids, ""])
            request = PoolRequest(f"p{number}", "place", job=drawn.choice(ids), partner=partner)
            bench.update(requests=(*bench.snapshot.requests, request))
        bench.decide_once(ready=drawn.random() < 0.8)
    before = None
    for _ in range(7):  # dead workers are forgotten first, and jobs that need them fail
        bench.settle(within=40)
        before, after = {j.id: bench.roles(j.id) for j in bench.snapshot.jobs}, before
        bench.update(now_ms=bench.snapshot.now_ms + 130_000)
    assert before == after, "no job alternates between share and pause"


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(200, 240))
def test_decisions_apply_with_engines_of_several_workers(seed: int) -> None:
    """Check random walks of jobs with many degrees. Each running job gets an engine in the end, if
    it could have one with the mesh to itself.
    """
    drawn = random.Random(seed)
    hosts = [drawn.randint(2, 6) for _ in range(drawn.randint(1, 3))]
    about = PoolSettings(gang_scope="network" if seed % 3 == 0 else "host")
    bench = PlannerBench(
        pool(hosts, job("first", tensor_parallel=(2,), can_time_slice=False), settings=about)
    )
    for number in range(STEPS):
        step(bench, drawn, number, [(1,), (1, 2), (2,), (2, 4), (1, 4), (4,)])
        bench.decide_once(ready=drawn.random() < 0.8)
        assert_allowed_degrees(bench)
    bench.settle(within=40)


def assert_allowed_degrees(bench: PlannerBench) -> None:
    """Assert that all engines have degrees that their jobs allow."""
    for planned in bench.snapshot.jobs:
        engines = [r for _, r in bench.list_instances(planned.id) if r.role == Role.ROLLOUT]
        assert {len(engine.ranks) for engine in engines} <= set(
            planned.requirements.tensor_parallel
        )


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(300, 330))
def test_single_job_has_an_engine_after_any_history(seed: int) -> None:
    drawn = random.Random(seed)
    hosts = [drawn.randint(2, 6) for _ in range(drawn.randint(1, 3))]
    degrees = drawn.choice([(1, 2), (2,), (2, 4), (4,)])
    ranks = drawn.choice([1, 1, 2])
    wanted = job("first", tensor_parallel=degrees, ranks=ranks, can_time_slice=degrees[0] == 1)
    if explain_infeasible(wanted.requirements, pool(hosts).workers, PoolSettings()):
        return
    bench = PlannerBench(pool(hosts, wanted))
    for number in range(STEPS):
        worker = drawn.choice(bench.snapshot.workers).id
        kind = drawn.choice(["dies", "back", "back", "later"])
        if kind in ("dies", "back"):
            bench.update_worker(worker, alive=kind == "back", token=100 + number)
        else:
            bench.update(now_ms=bench.snapshot.now_ms + 1000 * drawn.choice([1, 11]))
        bench.decide_once(ready=drawn.random() < 0.8)
    for worker in [worker.id for worker in bench.snapshot.workers]:
        bench.update_worker(worker, alive=True, token=999)
    bench.update_job("first", has_checkpoint=True)
    bench.settle(within=40)
    if bench.snapshot.jobs:  # it has not failed for a mesh that was too small for too long
        assert {"core", "rollout"} <= set(bench.roles("first").values())


def step(
    bench: PlannerBench,
    drawn: random.Random,
    number: int,
    degrees: Sequence[tuple[int, ...]],
    **requirements: Any,
) -> None:
    """Apply one random event to jobs, to a worker, or to the clock."""
    snapshot, kind = bench.snapshot, drawn.choice(KINDS)
    worker = drawn.choice(snapshot.workers).id
    ids = [planned.id for planned in snapshot.jobs]
    if kind == "comes" and len(ids) < 5:
        make_claim = drawn.choice(degrees)
        more = job(
            f"j{number}",
            tensor_parallel=make_claim,
            can_time_slice=make_claim[0] == 1,
            ranks=drawn.choice([1, 1, 2, 3]),
            priority=drawn.randint(0, 3),
            phase=Phase.QUEUED,
            submitted_ms=number,
            has_checkpoint=drawn.random() < 0.6,
            **requirements,
        )
        bench.update(jobs=(*snapshot.jobs, more))
    elif kind == "ends" and ids:
        removed = drawn.choice(ids)
        bench.update(jobs=tuple(planned for planned in snapshot.jobs if planned.id != removed))
    elif kind in ("dies", "back"):
        bench.update_worker(worker, alive=kind == "back", token=100 + number)
    elif kind == "idle":
        role = drawn.choice([Role.IDLE, Role.ROLLOUT])
        pool_request = PoolRequest(f"op{number}", "move", worker, role, drawn.choice(ids or [""]))
        bench.update(requests=(*snapshot.requests, pool_request))
    elif kind == "later":
        bench.update(now_ms=snapshot.now_ms + 1000 * drawn.choice([1, 11, 130]))
    elif kind == "saved" and ids:
        bench.update_job(drawn.choice(ids), has_checkpoint=True)


def resident(id: str, of: str, role: Role, *ranks: int, tier: Tier = Tier.ACCELERATOR) -> Instance:
    core = role == Role.TRAINING
    return Instance(id, of, role, core, ranks, tier, desired_since_ms=NOW_MS)


def gangs(*found: Gang) -> tuple[Gang, ...]:
    return tuple(set_reconciled(gang) for gang in found)


def test_instances_of_a_gang_are_removed_before_another_core_uses_it() -> None:
    """g0 has a core that sleeps on both of its workers, and another job's engine on the second."""
    asleep = resident("g0.0", "a", Role.TRAINING, 0, 1, tier=Tier.DISK)
    engine = resident("g0.1", "d", Role.ROLLOUT, 1)
    there = gangs(
        Gang("g0", ("w0", "w1"), 1, (asleep, engine), next_instance=2),
        Gang("g1", ("w2",), 1, (resident("g1.0", "d", Role.TRAINING, 0),), next_instance=1),
    )
    jobs = (
        job("b", ranks=2, needs_rollout=False, priority=9, phase=Phase.QUEUED),
        job("d", priority=5, submitted_ms=1),
        job("a", ranks=2, needs_rollout=False, submitted_ms=2, has_checkpoint=True),
    )
    bench = PlannerBench(replace(pool([4], *jobs, gangs_formed=2), gangs=there))
    decisions = bench.decide_once()
    removed = {d.instance for d in decisions if isinstance(d, RemoveInstance)}
    core = next(d for d in decisions if isinstance(d, PlaceInstance) and d.instance.core)
    assert removed == {"g0.0", "g0.1"} and core.instance.job == "b"
    bench.update(requests=(PoolRequest("op", "move", "w1", Role.IDLE),))
    bench.settle()
    assert bench.roles("d") == {"w2": "core+rollout"}, "w1 was put aside, and the planner lives"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gang_of_a_core_dissolves_after_a_checkpoint(checkpointed: bool) -> None:
    """Check that a core's gang dissolves once a checkpoint covers it. Its second worker has an
    engine that makes way; the core of the first one needs a new gang.
    """
    core, engine = resident("g0.0", "d", Role.TRAINING, 0), resident("g0.1", "d", Role.ROLLOUT, 1)
    there = gangs(Gang("g0", ("w0", "w1"), 1, (core, engine), next_instance=2))
    jobs = (
        job("b", ranks=2, needs_rollout=False, priority=9, phase=Phase.QUEUED),
        job("d", submitted_ms=1, has_checkpoint=checkpointed),
    )
    bench = PlannerBench(replace(pool([3], *jobs, gangs_formed=1), gangs=there))
    bench.settle()
    assert bench.roles("d") == {"w0": "core+rollout"}
    if checkpointed:
        assert bench.roles("b") == {"w1": "core", "w2": "core"}
    else:
        assert "g0.0" in {r.id for _, r in bench.list_instances("d")}
        assert bench.snapshot.jobs[0].block_reason.startswith("waiting: its core needs 2 of host0")
        bench.update_job("d", has_checkpoint=True)
        bench.settle()
    assert bench.count_awake_workers("b") == 2 and bench.snapshot.jobs[0].block_reason == ""


@pytest.mark.parametrize(
    ("lost", "stays"), [("w1", {"g0.1", "g0.2"}), ("w2", {"g0.0", "g0.2"}), ("w0", set())]
)
def test_instances_without_lost_ranks_stay_while_the_slice_scheduler_lives(
    lost: str, stays: set[str]
) -> None:
    """Three workers: a core that sleeps on the first two, an engine of another job on the last."""
    here = (
        resident("g0.0", "a", Role.TRAINING, 0, 1, tier=Tier.DISK),
        resident("g0.1", "d", Role.ROLLOUT, 2),
        resident("g0.2", "d", Role.TRAINING, 0),
    )
    there = gangs(Gang("g0", ("w0", "w1", "w2"), 1, here, next_instance=3))
    jobs = (
        job("d", priority=5, min_workers=2),
        job("a", ranks=2, needs_rollout=False, min_workers=3, submitted_ms=2),
    )
    bench = PlannerBench(replace(pool([3], *jobs, gangs_formed=1), gangs=there))
    bench.update_worker(lost, alive=False)
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    remaining = {r.id for gang in bench.snapshot.gangs for r in gang.instances}
    assert remaining & {r.id for r in here} == stays


bounds = st.builds(
    lambda least, more, weight: ShareBounds(least, least + more, weight),
    st.integers(1, 4),
    st.one_of(st.integers(0, 8), st.just(math.inf)),
    st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)


def allocate_max_min(claims: list[ShareBounds], workers: int) -> list[Fraction]:
    """Compute the max-min allocation by its definition: shares rise by weight, full claims stop,
    and each claim gets its minimum.
    """
    fixed: dict[int, Fraction] = {}
    while True:
        open_ = [i for i in range(len(claims)) if i not in fixed]
        if not open_:
            break
        remaining = Fraction(workers) - sum(fixed.values())
        level = remaining / sum(Fraction(claims[i].weight) for i in open_)
        low = [i for i in open_ if level * Fraction(claims[i].weight) < claims[i].min_workers]
        high = [i for i in open_ if level * Fraction(claims[i].weight) > claims[i].max_workers]
        over = sum(
            level * Fraction(claims[i].weight) - Fraction(claims[i].max_workers) for i in high
        )
        under = sum(claims[i].min_workers - level * Fraction(claims[i].weight) for i in low)
        # Of both kinds of bounds the one that moves the level further holds for certain.
        if low and under >= over:
            fixed.update({i: Fraction(claims[i].min_workers) for i in low})
        elif high:
            fixed.update({i: Fraction(claims[i].max_workers) for i in high})
        else:
            fixed.update({i: level * Fraction(claims[i].weight) for i in open_})
    return [fixed[i] for i in range(len(claims))]


@given(st.lists(bounds, min_size=1, max_size=5), st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_shares_are_within_one_of_weighted_max_min(claims: list[ShareBounds], more: int) -> None:
    workers = sum(claim.min_workers for claim in claims) + more
    compute_shares = list(
        fill_shares({str(i): claim for i, claim in enumerate(claims)}, workers).values()
    )
    for share, exact, claim in zip(
        compute_shares, allocate_max_min(claims, workers), claims, strict=True
    ):
        assert abs(share - exact) < 1
        assert claim.min_workers <= share <= claim.max_workers
    assert sum(compute_shares) == min(workers, sum(claim.max_workers for claim in claims))


def compute_shares(
    workers: int, *jobs: PlannedJob, turns: bool = True, **claims: ShareClaim
) -> dict[str, int]:
    ordered = sorted(jobs, key=lambda j: (-j.requirements.priority, j.submitted_ms))
    return divide_pool(ordered, {"host": workers}, claims, turns).workers


def make_claim(id: str, at: int, **about: Any) -> PlannedJob:
    return job(id, submitted_ms=at, **about)


def test_equal_jobs_share_equally_and_the_first_gets_the_remainder() -> None:
    assert compute_shares(9, make_claim("a", 1), make_claim("b", 2)) == {"a": 5, "b": 4}


def test_shares_are_weighted() -> None:
    assert compute_shares(8, make_claim("a", 1), make_claim("b", 2, share=3.0)) == {"a": 2, "b": 6}


def test_four_jobs_on_six_workers_all_run() -> None:
    four = [make_claim(id, at) for at, id in enumerate("abcd")]
    assert compute_shares(6, *four) == {"a": 2, "b": 2, "c": 1, "d": 1}


def test_last_job_waits_without_time_slicing_and_others_have_their_minimum() -> None:
    four = [make_claim(id, at) for at, id in enumerate("abcd")]
    assert compute_shares(6, *four, turns=False) == {"a": 2, "b": 2, "c": 2}


def test_higher_priority_gets_its_maximum_and_others_keep_their_minimum() -> None:
    found = compute_shares(
        8, make_claim("a", 1), make_claim("b", 2), make_claim("c", 3, priority=1)
    )
    assert found == {"c": 4, "a": 2, "b": 2}


def test_higher_priority_that_needs_all_pauses_the_others() -> None:
    found = compute_shares(4, make_claim("a", 1), make_claim("b", 2, priority=1, min_workers=4))
    assert found == {"b": 4}


def test_small_job_passes_a_waiting_large_one_and_yields_later() -> None:
    first, large, small = (
        make_claim("a", 1, min_workers=3, max_workers=3),
        make_claim("b", 2, min_workers=3),
        make_claim("c", 3),
    )
    assert compute_shares(5, first, large, small, turns=False) == {"a": 3, "c": 2}
    assert compute_shares(5, large, small, turns=False) == {"b": 3, "c": 2}
    assert compute_shares(4, large, small, turns=False) == {"b": 4}


def test_job_keeps_workers_that_no_other_job_can_use() -> None:
    assert compute_shares(1, make_claim("a", 1), turns=False, a=ShareClaim("host")) == {"a": 1}
    assert compute_shares(1, make_claim("a", 1), turns=False) == {}, "it has no core"
    queued = make_claim("a", 1, phase=Phase.QUEUED)
    assert compute_shares(1, queued, turns=False, a=ShareClaim("host")) == {}


def test_requested_workers_stay_in_their_job() -> None:
    found = compute_shares(
        8, make_claim("a", 1), make_claim("b", 2), b=ShareClaim("host", pinned_workers=5)
    )
    assert found == {"a": 2, "b": 6}


def test_core_waits_for_a_host_with_space_for_all_ranks() -> None:
    found = divide_pool([job("a", ranks=3)], {"host0": 2, "host1": 2}, {}, True)
    assert found.workers == {} and "no host has 3" in found.rejected["a"]
    assert divide_pool([job("a", ranks=3)], {"host0": 2, "host1": 3}, {}, True).core_places == {
        "a": "host1"
    }
