"""Engines of several workers: gangs of one host, formed, merged and split with few changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.decisions import FailJob, RejectRequest, RemoveInstance
from meshrl.common.state.pool.scheduling.feasibility import (
    drop_infeasible_degrees,
    explain_infeasible,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.workers.rows import InstancePhase, Role, TierBytes, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.policies.engine_placement import reshape_engines
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.presence import compute_presence
from tests.unit.planner.pools import (
    QUIET,
    PlannerBench,
    apply_decisions,
    check,
    job,
    pool,
    set_phase,
    set_reconciled,
    start_pool,
)

SHORT_MS = round(1000 * PoolSettings().shortage_grace_s) + 1


def degrees(bench: PlannerBench, id: str = "job") -> list[int]:
    """Return the degrees of the job's engines in falling order."""
    there = [r for _, r in bench.list_instances(id) if r.role == Role.ROLLOUT]
    return sorted((len(r.ranks) for r in there), reverse=True)


def reshape(
    bench: PlannerBench, requested_degrees: Sequence[int], hybrids: int | None = None
) -> bool:
    """Request these engines in one snapshot, let them settle, and return whether they are there."""
    snapshot = bench.snapshot
    draft = PoolDraft(snapshot, compute_presence(snapshot, PlannerMemory()).usable_workers)
    done = reshape_engines(draft, snapshot.jobs[0], requested_degrees, hybrids=hybrids)
    draft.dissolve_empty_gangs()
    bench.decisions = draft.decisions
    bench.snapshot = apply_decisions(snapshot, draft.decisions)
    check(bench.snapshot)
    bench.update(moves=())
    return done


def count_removals(bench: PlannerBench) -> int:
    return sum(isinstance(decision, RemoveInstance) for decision in bench.decisions)


# -- by default ------------------------------------------------------------------------------------


def test_engines_are_smallest_gangs_within_one_host() -> None:
    bench = start_pool([4, 3], job(tensor_parallel=(2, 4)))
    assert degrees(bench) == [2, 2] and "core" in bench.roles().values()
    hosts = {w.id: w.host for w in bench.snapshot.workers}
    for gang in bench.snapshot.gangs:
        assert len({hosts[worker] for worker in gang.workers}) == 1
    assert len(bench.roles()) == 7, "who are too few for an engine help"


def test_small_workers_form_larger_engines() -> None:
    bench = PlannerBench(
        pool(
            [4],
            job(
                tensor_parallel=(1, 2, 4),
                memory=RoleMemory(core=400, hybrid=200, engines={1: 50, 2: 25, 4: 12}),
            ),
            settings=QUIET,
        )
    )
    for worker in ("w1", "w2", "w3"):
        bench.update_worker(worker, budget=TierBytes(accelerator=30))
    bench.settle()
    assert degrees(bench) == [2] and bench.roles()["w0"] == "core"
    assert bench.snapshot.jobs[0].requirements.tensor_parallel == (1, 2, 4)


def test_engine_of_several_workers_is_not_time_sliced_with_a_core() -> None:
    bench = start_pool([2], job(tensor_parallel=(2,), phase=Phase.QUEUED, can_time_slice=False))
    bench.update(now_ms=bench.snapshot.now_ms + SHORT_MS)
    [failed] = [d for d in bench.decide_once() if isinstance(d, FailJob)]
    assert "needs 3 workers (1 for its core, 2 to roll out)" in failed.error


@pytest.mark.parametrize(
    ("hosts", "ranks", "says"),
    [([2, 1], 1, ""), ([1, 1, 1], 1, "cannot hold both"), ([3, 1], 2, "cannot hold both")],
)
def test_job_without_space_for_core_and_engine_is_blocked_with_a_reason(
    hosts: list[int], ranks: int, says: str
) -> None:
    requested_degrees = job(tensor_parallel=(2,), ranks=ranks, can_time_slice=False)
    bench = PlannerBench(pool(hosts, requested_degrees))
    reasons = explain_infeasible(
        requested_degrees.requirements, bench.snapshot.workers, PoolSettings()
    )
    assert says in reasons and bool(reasons) == bool(says)


def test_core_yields_the_host_to_an_engine_that_fits_only_there() -> None:
    bench = start_pool([2, 1], job(tensor_parallel=(2,), can_time_slice=False))
    assert bench.roles() == {"w0": "rollout", "w1": "rollout", "w2": "core"}


def test_engine_with_a_lost_worker_is_replaced() -> None:
    bench = start_pool([5], job(tensor_parallel=(2,), can_time_slice=False, allows_hybrids=False))
    assert degrees(bench) == [2, 2]
    bench.update_worker("w2", alive=False)
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    assert degrees(bench) == [2] and "w2" not in bench.roles()
    bench.update_worker("w2", alive=True, token=99)
    bench.settle()
    assert degrees(bench) == [2, 2]


def test_hybrids_and_small_engines_of_other_jobs_yield_to_an_only_engine() -> None:
    large_pool = job("many", submitted_ms=1)
    bench = start_pool([4, 4], large_pool, settings=QUIET)
    late = job(
        "late", tensor_parallel=(4,), can_time_slice=False, phase=Phase.QUEUED, submitted_ms=2
    )
    bench.update(jobs=(large_pool, late))
    bench.settle()
    assert degrees(bench, "late") == [4]
    assert degrees(bench, "many")


def test_excess_share_is_returned_by_whole_engines() -> None:
    first = job("first", tensor_parallel=(2,), can_time_slice=False, allows_hybrids=False)
    bench = start_pool([9], first)
    assert degrees(bench, "first") == [2, 2, 2, 2]
    second = job(
        "second", tensor_parallel=(2,), can_time_slice=False, phase=Phase.QUEUED, submitted_ms=3
    )
    bench.update(jobs=(first, second))
    bench.settle()
    assert degrees(bench, "first") == [2, 2] and degrees(bench, "second") == [2]


def test_engines_have_the_degrees_allowed_by_the_job() -> None:
    bench = start_pool([5], job(allows_hybrids=False))
    assert degrees(bench) == [1, 1, 1, 1]
    bench.update(jobs=(job(allows_hybrids=False, tensor_parallel=(2,), can_time_slice=False),))
    bench.settle()
    assert degrees(bench) == [2, 2]


# -- as a user requests ----------------------------------------------------------------------------


@pytest.fixture
def eight_engines() -> PlannerBench:
    """Return a core and eight engines of one worker on a host of nine."""
    bench = start_pool([9], job(tensor_parallel=(1, 2, 4, 8), allows_hybrids=False))
    return bench


def test_merge_keeps_the_other_engines(eight_engines: PlannerBench) -> None:
    before = {r.id for _, r in eight_engines.list_instances()}
    assert reshape(eight_engines, [4, 2, 1, 1])
    assert degrees(eight_engines) == [4, 2, 1, 1]
    assert len(before & {r.id for _, r in eight_engines.list_instances()}) == 3, (
        "the core, and two engines"
    )
    assert count_removals(eight_engines) == 6
    assert reshape(eight_engines, [4, 2, 1, 1]) and not eight_engines.decisions


def test_engine_is_split(eight_engines: PlannerBench) -> None:
    assert not reshape(eight_engines, [4, 4]), "one serves until the first is ready"
    assert reshape(eight_engines, [4, 4])
    assert reshape(eight_engines, [4, 2, 1, 1])
    assert degrees(eight_engines) == [4, 2, 1, 1] and count_removals(eight_engines) == 1


def test_last_engine_stays_until_another_is_ready() -> None:
    bench = start_pool(
        [5], job(tensor_parallel=(2, 4), allows_hybrids=False, can_time_slice=False, max_workers=3)
    )
    assert degrees(bench) == [2]
    [old] = [r.id for _, r in bench.list_instances() if r.role == Role.ROLLOUT]
    bench.update(workers=(*bench.snapshot.workers, *more("w5", "w6")))
    assert not reshape(bench, [4])
    assert degrees(bench) == [4, 2] and old in {r.id for _, r in bench.list_instances()}
    assert reshape(bench, [4]) and degrees(bench) == [4]


def test_last_engine_is_removed_if_no_other_workers_exist(eight_engines: PlannerBench) -> None:
    reshape(eight_engines, [8])
    assert degrees(eight_engines) == [8]
    assert reshape(eight_engines, [4, 4]) and degrees(eight_engines) == [4, 4]


def test_pinned_engines_stay_and_count(eight_engines: PlannerBench) -> None:
    eight_engines.update(requests=(PoolRequest("op", "move", "w1", Role.ROLLOUT, "job"),))
    eight_engines.settle()
    reshape(eight_engines, [4, 2, 1])
    assert degrees(eight_engines) == [4, 2, 1]
    assert any(r.pinned and len(r.ranks) == 1 for _, r in eight_engines.list_instances())
    reshape(eight_engines, [4, 2])
    assert degrees(eight_engines) == [4, 2, 1], "who was put there by hand is no policy's to move"


def test_hybrids_become_an_engine_and_hybrids_again() -> None:
    bench = start_pool([7], job(tensor_parallel=(2,), can_time_slice=False))
    assert degrees(bench) == [2, 2, 2]
    assert reshape(bench, [2, 2], hybrids=2)
    assert sorted(bench.roles().values()).count("training") == 2
    assert reshape(bench, [2, 2, 2], hybrids=0)
    assert degrees(bench) == [2, 2, 2]


def test_disallowed_degrees_are_left_out(eight_engines: PlannerBench) -> None:
    assert reshape(eight_engines, [8, 3])
    assert degrees(eight_engines) == [8]


def test_no_engine_spans_hosts() -> None:
    bench = start_pool([3, 2], job(tensor_parallel=(1, 4), allows_hybrids=False))
    assert not reshape(bench, [4])
    assert degrees(bench) == [1, 1, 1, 1]


def test_failed_merge_is_undone(eight_engines: PlannerBench) -> None:
    reshape(eight_engines, [8])
    reshape(eight_engines, [4, 4])
    bench = eight_engines
    snapshot = bench.snapshot
    draft = PoolDraft(snapshot, compute_presence(snapshot, PlannerMemory()).usable_workers)
    reshape_engines(draft, snapshot.jobs[0], [8])
    bench.snapshot = apply_decisions(snapshot, draft.decisions, ready=False)
    [gang] = [g for g in bench.snapshot.gangs if len(g.workers) == 8]
    failed = tuple(set_phase(r, InstancePhase.FAILED) for r in gang.instances)
    others = [set_reconciled(g) for g in bench.snapshot.gangs if g is not gang]
    bench.update(gangs=(*others, replace(gang, instances=failed)))
    bench.settle()
    assert degrees(bench) == [4, 4]
    assert not bench.snapshot.moves


# -- by hand ---------------------------------------------------------------------------------------


def test_moving_one_worker_of_an_engine_ends_the_engine() -> None:
    bench = start_pool([5], job(tensor_parallel=(2,), can_time_slice=False))
    bench.update(requests=(PoolRequest("op", "move", "w2", Role.TRAINING, "job"),))
    bench.settle()
    assert bench.roles()["w2"] == "training" and degrees(bench) == [2]
    bench.update(requests=(PoolRequest("op2", "move", "w2", Role.ROLLOUT, "job"),))
    bench.settle()
    assert degrees(bench) == [2, 2]


def test_single_worker_request_forms_no_engine_of_two() -> None:
    bench = start_pool(
        [4, 1], job(tensor_parallel=(2,), can_time_slice=False, allows_hybrids=False)
    )
    bench.update(requests=(PoolRequest("op", "move", "w4", Role.ROLLOUT, "job"),))
    [declined] = [d for d in bench.decide_once() if isinstance(d, RejectRequest)]
    assert "needs 2 workers of one host" in declined.reason or bench.roles()["w4"] == "core"


# -- whatever comes --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_split_of_a_host_is_reachable(seed: int) -> None:
    """Check that on one host every split of its workers into powers of two is reachable."""
    drawn = random.Random(seed)
    size = drawn.randint(2, 12)
    bench = start_pool([size + 1], job(tensor_parallel=(1, 2, 4, 8), allows_hybrids=False))
    for _ in range(4):
        requested_degrees: list[int] = []
        room = size
        while room and (not requested_degrees or drawn.random() < 0.8):
            requested_degrees.append(drawn.choice([d for d in (1, 2, 4, 8) if d <= room]))
            room -= requested_degrees[-1]
        met = [reshape(bench, requested_degrees) for _ in range(3)]
        assert met[-1] and degrees(bench) == sorted(requested_degrees, reverse=True)


def more(*ids: str) -> list[WorkerRow]:
    return [WorkerRow(id, "host0", "cpu:0", 50 + number) for number, id in enumerate(ids)]


def test_degrees_that_fit_no_worker_are_skipped() -> None:
    workers = pool([2]).workers
    need = job(tensor_parallel=(1, 2, 4), can_time_slice=True).requirements
    assert drop_infeasible_degrees(need, workers).tensor_parallel == (1, 2)
    assert drop_infeasible_degrees(
        job(tensor_parallel=(4,)).requirements, workers
    ).tensor_parallel == (4,)
