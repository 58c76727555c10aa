"""One job and the workers of its mesh: the first split, repairs, losses, turns."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.placing.decisions import FailJob, Lose, Place
from meshrl.common.state.pool.workers.rows import Budget, Role
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.launch.up_down import pool_without_file
from tests.unit.planner.pools import NOW_MS, QUIET, Looks, begun, job, pool

LOST_MS = round(1000 * PoolSettings().lost_s) + 1
SHORT_MS = round(1000 * PoolSettings().short_s) + 1
DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("workers", "about", "roles"),
    [
        (2, {}, ["core", "rollout"]),
        (4, {}, ["core", "rollout", "rollout", "rollout"]),
        (4, {"scoring": True}, ["core", "scoring", "rollout", "rollout"]),
        (4, {"config": PlannerConfig(training=2)}, ["core", "rollout", "training", "rollout"]),
        (4, {"ranks": 2}, ["core", "core", "rollout", "rollout"]),
        (1, {}, ["core+rollout"]),
        (2, {"ranks": 2}, ["core+rollout", "core+rollout"]),
        (2, {"scoring": True}, ["core+rollout", "scoring"]),
        (1, {"rolls_out": False}, ["core"]),
        (8, {"most": 3}, ["core", "rollout", "rollout"]),
    ],
)
def test_a_job_is_placed_on_idle_workers(
    workers: int, about: dict[str, Any], roles: list[str]
) -> None:
    looks = begun([workers], job(**about))
    assert list(looks.roles().values()) == roles


def test_a_worker_that_joins_rolls_out() -> None:
    looks = begun([2], job())
    looks.change(workers=pool([3]).workers[:2] + pool([3]).workers[2:])
    decisions = looks.settle()
    assert list(looks.roles().values()) == ["core", "rollout", "rollout"]
    assert [d.resident.role for d in decisions if isinstance(d, Place)] == [Role.ROLLOUT]


def lose(looks: Looks, worker: str) -> None:
    looks.worker(worker, alive=False)
    looks.settle()
    looks.change(now_ms=looks.snapshot.now_ms + LOST_MS)


def test_a_worker_that_is_missing_for_a_moment_changes_nothing() -> None:
    looks = begun([3], job())
    looks.worker("w0", alive=False)
    assert looks.settle() == []
    looks.worker("w0", alive=True, token=77)
    looks.change(now_ms=looks.snapshot.now_ms + LOST_MS)
    assert looks.settle() == []


def test_a_lost_core_is_repaired_by_a_helper_which_has_the_model() -> None:
    looks = begun([4], job(config=PlannerConfig(training=2)))
    lose(looks, "w0")
    decisions = looks.settle()
    assert isinstance(decisions[0], Lose) and decisions[0].worker == "w0"
    assert looks.roles() == {"w1": "rollout", "w2": "core", "w3": "rollout"}
    assert next(d for d in decisions if isinstance(d, Place)).why.rule == "repair"


def test_a_lost_worker_that_comes_back_is_used_again() -> None:
    looks = begun([3], job())
    lose(looks, "w0")
    looks.settle()
    looks.worker("w0", alive=True, token=78)
    looks.settle()
    assert sorted(looks.roles().values()) == ["core", "rollout", "rollout"]


def test_a_worker_is_told_lost_once() -> None:
    looks = begun([3], job())
    lose(looks, "w2")
    assert sum(isinstance(d, Lose) for d in looks.settle()) == 1
    looks.change(now_ms=looks.snapshot.now_ms + 10 * LOST_MS)
    assert looks.settle() == []


def test_the_last_two_workers_less_one_take_turns_and_end_them_when_it_is_back() -> None:
    looks = begun([2], job())
    lose(looks, "w0")
    looks.settle()
    assert looks.roles() == {"w1": "core+rollout"}
    looks.worker("w0", alive=True, token=79)
    decisions = looks.settle()
    assert looks.roles() == {"w0": "rollout", "w1": "core"}
    core = next(r for _, r in looks.residents() if r.core)
    assert not core.turns and core.generation == 1
    assert all(d.resident.generation == 1 for d in decisions if isinstance(d, Place))


def test_without_turns_a_job_goes_on_with_what_is_left() -> None:
    looks = begun([2], job(), settings=QUIET)
    lose(looks, "w1")
    looks.settle()
    assert looks.roles() == {"w0": "core"}
    assert looks.snapshot.jobs[0].held == ""


def test_a_rank_lost_takes_its_core_with_it_which_forms_anew() -> None:
    looks = begun([5], job(ranks=2))
    lose(looks, "w1")
    looks.settle()
    cores = [w for w, role in looks.roles().items() if role == "core"]
    assert len(cores) == 2 and "w1" not in cores
    assert any(role == "rollout" for role in looks.roles().values())


def test_ranks_are_of_one_host() -> None:
    looks = begun([1, 3], job(ranks=3))
    assert [w for w, role in looks.roles().items() if role == "core"] == ["w1", "w2", "w3"]


def test_a_mesh_that_is_new_is_waited_for_and_then_a_job_takes_turns() -> None:
    looks = begun([1], job(phase=Phase.QUEUED), up_ms=NOW_MS)
    assert looks.snapshot.jobs[0].held == "", "nobody waits while workers may still join"
    looks.change(now_ms=NOW_MS + 6000)
    looks.settle()
    assert looks.roles() == {"w0": "core+rollout"}
    assert looks.snapshot.jobs[0].held == ""


def test_a_job_that_can_never_fit_is_waited_with_and_fails_with_the_way_out() -> None:
    looks = begun([1], job(ranks=2, phase=Phase.QUEUED))
    assert looks.snapshot.jobs
    looks.change(now_ms=looks.snapshot.now_ms + SHORT_MS)
    failed = next(d for d in looks.look() if isinstance(d, FailJob))
    assert "--workers 2" in failed.error


def test_a_job_waits_for_hosts_where_the_head_has_no_workers() -> None:
    settings = pool_without_file(0)
    looks = begun([1], job(ranks=2, phase=Phase.QUEUED), settings=settings)
    looks.change(now_ms=looks.snapshot.now_ms + DAY_MS)
    assert looks.snapshot.jobs and not [d for d in looks.look() if isinstance(d, FailJob)]
    assert pool_without_file(1) == PoolSettings()


def test_a_job_that_is_too_large_for_every_accelerator_fails_with_the_bytes() -> None:
    looks = Looks(pool([2], job(bytes=100)))
    for worker in ("w0", "w1"):
        looks.worker(worker, budget=Budget(accelerator=300))
    looks.settle()
    looks.change(now_ms=looks.snapshot.now_ms + SHORT_MS)
    failed = next(d for d in looks.look() if isinstance(d, FailJob))
    assert "400 bytes" in failed.error and "the largest has 300" in failed.error
    assert "training.ranks" in failed.error


def test_a_job_that_has_ended_leaves_nothing() -> None:
    looks = begun([4], job(ranks=2))
    looks.change(jobs=())
    looks.settle()
    assert looks.snapshot.gangs == ()
    assert all(worker.gang == "" for worker in looks.snapshot.workers)
    assert all(host.services == () for host in looks.snapshot.hosts)


def test_a_host_that_drains_is_left_by_a_core_when_a_checkpoint_has_it() -> None:
    looks = begun([2, 2], job())
    assert looks.roles()["w0"] == "core"
    looks.drain("host0")
    looks.settle()
    assert looks.roles()["w0"] == "core" and "w1" not in looks.roles()
    looks.job("job", checkpointed=True)
    looks.settle()
    assert set(looks.roles()) == {"w2", "w3"}
    assert sorted(looks.roles().values()) == ["core", "rollout"]
