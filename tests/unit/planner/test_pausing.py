"""What becomes of a core that is to sleep: late, failed, on a host that drains; and its waking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.placing.decisions import Remove
from meshrl.common.state.pool.placing.snapshot import PoolRequest
from meshrl.common.state.pool.workers.rows import Doing, Gang, Resident, Role, Tier
from tests.unit.planner.pools import Looks, begun, does, job, pool, settled


def paused(*hosts: int, **about: Any) -> Looks:
    """A job whose core was told a moment ago to sleep, for one that needs all there is."""
    looks = begun(hosts, job("a", **about))
    urgent = job(
        "b", phase=Phase.QUEUED, priority=5, least=sum(hosts), submitted_ms=9, checkpointed=True
    )
    looks.change(jobs=(*looks.snapshot.jobs, urgent))
    looks.look(ready=False)
    return looks


def failed(looks: Looks, tier: Tier) -> None:
    """Who was to sleep at that tier could not."""
    gangs = [
        replace(
            gang,
            residents=tuple(does(r, Doing.FAILED) if r.tier == tier else r for r in gang.residents),
        )
        for gang in looks.snapshot.gangs
    ]
    looks.change(gangs=tuple(gangs))


def test_what_a_core_said_of_an_earlier_wish_does_not_count_for_the_next() -> None:
    looks = paused(1, checkpointed=True)
    failed(looks, Tier.DISK)
    for _ in range(3):
        looks.look(ready=False)
        assert looks.roles("a") == {"w0": "core@memory"}, "nobody has said yet how that goes"
    failed(looks, Tier.MEMORY)
    looks.look(ready=False)
    assert looks.roles("a") == {}, "its checkpoint is left"


def test_a_core_that_does_not_fall_asleep_in_time_is_taken_for_failed_and_who_waits_is_told() -> (
    None
):
    looks = paused(1, checkpointed=True)
    told = [j.held for j in looks.snapshot.jobs if j.id == "b"]
    assert told == ["waiting: its core needs a worker; not yet asleep: g0.0 of a"]
    late_ms = round(1000 * looks.snapshot.settings.move_s) + 1
    for roles in ({"w0": "core@memory"}, {}):
        looks.change(now_ms=looks.snapshot.now_ms + late_ms)
        looks.look(ready=False)
        assert looks.roles("a") == roles
    looks.settle()
    assert looks.workers_of("b") == 1 and looks.snapshot.jobs[1].held == ""


def test_a_paused_core_leaves_a_host_that_drains_once_a_checkpoint_has_it() -> None:
    looks = paused(2, 2)
    looks.settle()
    looks.drain("host0")
    looks.change(requests=(PoolRequest("op", "drain", host="host0"),))
    looks.settle()
    looks.job("b", need=replace(looks.snapshot.jobs[1].need, least=2))
    looks.settle()
    assert looks.roles("a") == {"w0": "core@disk"} and looks.snapshot.requests
    looks.job("a", checkpointed=True)
    looks.change(rests=frozenset(n for host in looks.snapshot.hosts for n in host.services))
    looks.settle()
    assert looks.roles("a") == {} and not looks.snapshot.requests


def test_a_job_gives_back_where_a_core_is_to_wake_and_keeps_its_engine() -> None:
    asleep = Resident("g1.0", "a", Role.TRAINING, core=True, tier=Tier.DISK)
    there = (
        Gang("g0", ("w0",), 1, (Resident("g0.0", "d", Role.TRAINING, core=True),), placed=1),
        Gang("g1", ("w1",), 1, (asleep, Resident("g1.1", "d", Role.ROLLOUT)), placed=2),
        Gang("g2", ("w2",), 1, (Resident("g2.0", "d", Role.ROLLOUT),), placed=1),
    )
    jobs = (job("d"), job("a", rolls_out=False, most=1, submitted_ms=1))
    before = replace(pool([3], *jobs, gangs_formed=3), gangs=tuple(map(settled, there)))
    looks = Looks(before)
    decisions = looks.look()
    assert [d.resident for d in decisions if isinstance(d, Remove)] == ["g1.1"]
    assert looks.roles("a") == {"w1": "core"}
    assert {r.id for _, r in looks.residents("d")} == {"g0.0", "g2.0"}
