"""Engines of several workers: gangs of one host, formed, merged and split with few changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshrl.common.state.jobs import Phase
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
from tests.unit.planner.pools import QUIET, Looks, applied, begun, check, does, job, pool, settled

SHORT_MS = round(1000 * PoolSettings().shortage_grace_s) + 1


def degrees(looks: Looks, id: str = "job") -> list[int]:
    """Return the degrees of the job's engines in falling order."""
    there = [r for _, r in looks.residents(id) if r.role == Role.ROLLOUT]
    return sorted((len(r.ranks) for r in there), reverse=True)


def wished(looks: Looks, wanted: Sequence[int], helpers: int | None = None) -> bool:
    """Request these engines in one snapshot, let them settle, and return whether they are there."""
    snapshot = looks.snapshot
    draft = PoolDraft(snapshot, compute_presence(snapshot, PlannerMemory()).usable_workers)
    done = reshape_engines(draft, snapshot.jobs[0], wanted, hybrids=helpers)
    draft.dissolve_empty_gangs()
    looks.decisions = draft.decisions
    looks.snapshot = applied(snapshot, draft.decisions)
    check(looks.snapshot)
    looks.change(moves=())
    return done


def left(looks: Looks) -> int:
    return sum(isinstance(decision, RemoveInstance) for decision in looks.decisions)


# -- by default ------------------------------------------------------------------------------------


def test_engines_are_gangs_of_the_smallest_degree_of_one_host_each() -> None:
    looks = begun([4, 3], job(tensor_parallel=(2, 4)))
    assert degrees(looks) == [2, 2] and "core" in looks.roles().values()
    hosts = {w.id: w.host for w in looks.snapshot.workers}
    for gang in looks.snapshot.gangs:
        assert len({hosts[worker] for worker in gang.workers}) == 1
    assert len(looks.roles()) == 7, "who are too few for an engine help"


def test_workers_too_small_for_a_whole_model_form_the_next_degree() -> None:
    looks = Looks(
        pool(
            [4],
            job(tensor_parallel=(1, 2, 4), parameter_bytes=100, half_precision_engines=True),
            settings=QUIET,
        )
    )
    for worker in ("w1", "w2", "w3"):
        looks.worker(worker, budget=TierBytes(accelerator=30))
    looks.settle()
    assert degrees(looks) == [2] and looks.roles()["w0"] == "core"
    assert looks.snapshot.jobs[0].requirements.tensor_parallel == (1, 2, 4)


def test_an_engine_of_several_takes_no_turns_with_a_core() -> None:
    looks = begun([2], job(tensor_parallel=(2,), phase=Phase.QUEUED, can_time_slice=False))
    looks.change(now_ms=looks.snapshot.now_ms + SHORT_MS)
    [failed] = [d for d in looks.look() if isinstance(d, FailJob)]
    assert "needs 3 workers (1 for its core, 2 to roll out)" in failed.error


@pytest.mark.parametrize(
    ("hosts", "ranks", "says"),
    [([2, 1], 1, ""), ([1, 1, 1], 1, "no room for both"), ([3, 1], 2, "no room for both")],
)
def test_a_job_without_room_for_both_is_told(hosts: list[int], ranks: int, says: str) -> None:
    wanted = job(tensor_parallel=(2,), ranks=ranks, can_time_slice=False)
    looks = Looks(pool(hosts, wanted))
    told = explain_infeasible(wanted.requirements, looks.snapshot.workers, PoolSettings())
    assert says in told and bool(told) == bool(says)


def test_a_core_leaves_the_host_to_the_engine_that_fits_nowhere_else() -> None:
    looks = begun([2, 1], job(tensor_parallel=(2,), can_time_slice=False))
    assert looks.roles() == {"w0": "rollout", "w1": "rollout", "w2": "core"}


def test_a_worker_of_an_engine_that_is_lost_ends_it_and_another_one_is_formed() -> None:
    looks = begun([5], job(tensor_parallel=(2,), can_time_slice=False, allows_hybrids=False))
    assert degrees(looks) == [2, 2]
    looks.worker("w2", alive=False)
    looks.change(now_ms=looks.snapshot.now_ms + 11_000)
    looks.settle()
    looks.change(now_ms=looks.snapshot.now_ms + 11_000)
    looks.settle()
    assert degrees(looks) == [2] and "w2" not in looks.roles()
    looks.worker("w2", alive=True, token=99)
    looks.settle()
    assert degrees(looks) == [2, 2]


def test_helpers_and_smaller_engines_of_others_leave_for_a_jobs_only_engine() -> None:
    many = job("many", submitted_ms=1)
    looks = begun([4, 4], many, settings=QUIET)
    late = job(
        "late", tensor_parallel=(4,), can_time_slice=False, phase=Phase.QUEUED, submitted_ms=2
    )
    looks.change(jobs=(many, late))
    looks.settle()
    assert degrees(looks, "late") == [4]
    assert degrees(looks, "many")


def test_a_share_is_given_back_by_whole_engines() -> None:
    first = job("first", tensor_parallel=(2,), can_time_slice=False, allows_hybrids=False)
    looks = begun([9], first)
    assert degrees(looks, "first") == [2, 2, 2, 2]
    second = job(
        "second", tensor_parallel=(2,), can_time_slice=False, phase=Phase.QUEUED, submitted_ms=3
    )
    looks.change(jobs=(first, second))
    looks.settle()
    assert degrees(looks, "first") == [2, 2] and degrees(looks, "second") == [2]


def test_a_job_whose_file_allows_other_degrees_gets_engines_of_those() -> None:
    looks = begun([5], job(allows_hybrids=False))
    assert degrees(looks) == [1, 1, 1, 1]
    looks.change(jobs=(job(allows_hybrids=False, tensor_parallel=(2,), can_time_slice=False),))
    looks.settle()
    assert degrees(looks) == [2, 2]


# -- as a user requests ----------------------------------------------------------------------------


@pytest.fixture
def eight() -> Looks:
    """Return a core and eight engines of one worker on a host of nine."""
    looks = begun([9], job(tensor_parallel=(1, 2, 4, 8), allows_hybrids=False))
    return looks


def test_engines_are_merged_and_the_others_stay(eight: Looks) -> None:
    before = {r.id for _, r in eight.residents()}
    assert wished(eight, [4, 2, 1, 1])
    assert degrees(eight) == [4, 2, 1, 1]
    assert len(before & {r.id for _, r in eight.residents()}) == 3, "the core, and two engines"
    assert left(eight) == 6
    assert wished(eight, [4, 2, 1, 1]) and not eight.decisions


def test_an_engine_is_split(eight: Looks) -> None:
    assert not wished(eight, [4, 4]), "one serves until the first is ready"
    assert wished(eight, [4, 4])
    assert wished(eight, [4, 2, 1, 1])
    assert degrees(eight) == [4, 2, 1, 1] and left(eight) == 1


def test_the_last_engine_stays_until_another_one_is_ready() -> None:
    looks = begun(
        [5], job(tensor_parallel=(2, 4), allows_hybrids=False, can_time_slice=False, max_workers=3)
    )
    assert degrees(looks) == [2]
    [old] = [r.id for _, r in looks.residents() if r.role == Role.ROLLOUT]
    looks.change(workers=(*looks.snapshot.workers, *more("w5", "w6")))
    assert not wished(looks, [4])
    assert degrees(looks) == [4, 2] and old in {r.id for _, r in looks.residents()}
    assert wished(looks, [4]) and degrees(looks) == [4]


def test_without_other_workers_the_last_engine_makes_way(eight: Looks) -> None:
    wished(eight, [8])
    assert degrees(eight) == [8]
    assert wished(eight, [4, 4]) and degrees(eight) == [4, 4]


def test_pinned_engines_stay_and_count(eight: Looks) -> None:
    eight.change(requests=(PoolRequest("op", "move", "w1", Role.ROLLOUT, "job"),))
    eight.settle()
    wished(eight, [4, 2, 1])
    assert degrees(eight) == [4, 2, 1]
    assert any(r.pinned and len(r.ranks) == 1 for _, r in eight.residents())
    wished(eight, [4, 2])
    assert degrees(eight) == [4, 2, 1], "who was put there by hand is no policy's to move"


def test_helpers_become_an_engine_and_again_helpers() -> None:
    looks = begun([7], job(tensor_parallel=(2,), can_time_slice=False))
    assert degrees(looks) == [2, 2, 2]
    assert wished(looks, [2, 2], helpers=2)
    assert sorted(looks.roles().values()).count("training") == 2
    assert wished(looks, [2, 2, 2], helpers=0)
    assert degrees(looks) == [2, 2, 2]


def test_degrees_that_the_job_does_not_allow_are_left_out(eight: Looks) -> None:
    assert wished(eight, [8, 3])
    assert degrees(eight) == [8]


def test_no_engine_is_formed_over_hosts() -> None:
    looks = begun([3, 2], job(tensor_parallel=(1, 4), allows_hybrids=False))
    assert not wished(looks, [4])
    assert degrees(looks) == [1, 1, 1, 1]


def test_a_merge_that_fails_is_undone(eight: Looks) -> None:
    wished(eight, [8])
    wished(eight, [4, 4])
    looks = eight
    snapshot = looks.snapshot
    draft = PoolDraft(snapshot, compute_presence(snapshot, PlannerMemory()).usable_workers)
    reshape_engines(draft, snapshot.jobs[0], [8])
    looks.snapshot = applied(snapshot, draft.decisions, ready=False)
    [gang] = [g for g in looks.snapshot.gangs if len(g.workers) == 8]
    failed = tuple(does(r, InstancePhase.FAILED) for r in gang.instances)
    others = [settled(g) for g in looks.snapshot.gangs if g is not gang]
    looks.change(gangs=(*others, replace(gang, instances=failed)))
    looks.settle()
    assert degrees(looks) == [4, 4]
    assert not looks.snapshot.moves


# -- by hand ---------------------------------------------------------------------------------------


def test_a_worker_of_an_engine_is_moved_alone_and_the_engine_ends() -> None:
    looks = begun([5], job(tensor_parallel=(2,), can_time_slice=False))
    looks.change(requests=(PoolRequest("op", "move", "w2", Role.TRAINING, "job"),))
    looks.settle()
    assert looks.roles()["w2"] == "training" and degrees(looks) == [2]
    looks.change(requests=(PoolRequest("op2", "move", "w2", Role.ROLLOUT, "job"),))
    looks.settle()
    assert degrees(looks) == [2, 2]


def test_a_worker_alone_is_no_engine_of_two() -> None:
    looks = begun([4, 1], job(tensor_parallel=(2,), can_time_slice=False, allows_hybrids=False))
    looks.change(requests=(PoolRequest("op", "move", "w4", Role.ROLLOUT, "job"),))
    [declined] = [d for d in looks.look() if isinstance(d, RejectRequest)]
    assert "takes 2 workers of one host" in declined.reason or looks.roles()["w4"] == "core"


# -- whatever comes --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_wish_is_met_where_a_host_has_the_workers(seed: int) -> None:
    """Check that on one host every split of its workers into powers of two is reachable."""
    drawn = random.Random(seed)
    size = drawn.randint(2, 12)
    looks = begun([size + 1], job(tensor_parallel=(1, 2, 4, 8), allows_hybrids=False))
    for _ in range(4):
        wanted: list[int] = []
        room = size
        while room and (not wanted or drawn.random() < 0.8):
            wanted.append(drawn.choice([d for d in (1, 2, 4, 8) if d <= room]))
            room -= wanted[-1]
        met = [wished(looks, wanted) for _ in range(3)]
        assert met[-1] and degrees(looks) == sorted(wanted, reverse=True)


def more(*ids: str) -> list[WorkerRow]:
    return [WorkerRow(id, "host0", "cpu:0", 50 + number) for number, id in enumerate(ids)]


def test_degrees_that_fit_no_worker_are_not_thought_of() -> None:
    workers = pool([2]).workers
    need = job(tensor_parallel=(1, 2, 4), can_time_slice=True).requirements
    assert drop_infeasible_degrees(need, workers).tensor_parallel == (1, 2)
    assert drop_infeasible_degrees(
        job(tensor_parallel=(4,)).requirements, workers
    ).tensor_parallel == (4,)
