"""Whatever jobs and workers come and go, decisions apply: no gang ends that somebody is on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.placing.decisions import Place, Remove
from meshrl.common.state.pool.placing.fitting import never_fits
from meshrl.common.state.pool.placing.snapshot import PoolRequest
from meshrl.common.state.pool.workers.rows import Gang, Resident, Role, Tier
from meshrl.common.state.pool.workers.settings import PoolSettings
from tests.unit.planner.pools import NOW_MS, Looks, job, pool, settled

STEPS = 30
KINDS = ["comes", "comes", "ends", "dies", "back", "idle", "later", "saved", "saved"]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(100, 124))
def test_decisions_apply_whatever_comes_and_goes(seed: int) -> None:
    """Walks that are drawn from a seed; `Looks` applies each decision as Redis would have it."""
    drawn = random.Random(seed)
    hosts = [drawn.randint(2, 5) for _ in range(drawn.randint(1, 2))]
    about = PoolSettings(gangs="network" if seed % 3 == 0 else "host")
    looks = Looks(pool(hosts, job("first", ranks=2), settings=about))
    for number in range(STEPS):
        step(looks, drawn, number, [(1,)])
        looks.look(ready=drawn.random() < 0.8)
    looks.settle(within=40)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(200, 240))
def test_decisions_apply_where_engines_are_gangs(seed: int) -> None:
    """The same with jobs of many degrees; what runs has an engine in the end, if it could have one
    with the mesh to itself.
    """
    drawn = random.Random(seed)
    hosts = [drawn.randint(2, 6) for _ in range(drawn.randint(1, 3))]
    about = PoolSettings(gangs="network" if seed % 3 == 0 else "host")
    looks = Looks(pool(hosts, job("first", degrees=(2,), alternates=False), settings=about))
    for number in range(STEPS):
        step(looks, drawn, number, [(1,), (1, 2), (2,), (2, 4), (1, 4), (4,)])
        looks.look(ready=drawn.random() < 0.8)
        of_allowed_degrees(looks)
    looks.settle(within=40)


def of_allowed_degrees(looks: Looks) -> None:
    """All engines have degrees that their jobs allow."""
    for planned in looks.snapshot.jobs:
        engines = [r for _, r in looks.residents(planned.id) if r.role == Role.ROLLOUT]
        assert {len(engine.ranks) for engine in engines} <= set(planned.need.degrees)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(300, 330))
def test_a_job_alone_has_an_engine_whatever_has_come_and_gone(seed: int) -> None:
    drawn = random.Random(seed)
    hosts = [drawn.randint(2, 6) for _ in range(drawn.randint(1, 3))]
    degrees = drawn.choice([(1, 2), (2,), (2, 4), (4,)])
    ranks = drawn.choice([1, 1, 2])
    wanted = job("first", degrees=degrees, ranks=ranks, alternates=degrees[0] == 1)
    if never_fits(wanted.need, pool(hosts).workers, PoolSettings()):
        return
    looks = Looks(pool(hosts, wanted))
    for number in range(STEPS):
        worker = drawn.choice(looks.snapshot.workers).id
        kind = drawn.choice(["dies", "back", "back", "later"])
        if kind in ("dies", "back"):
            looks.worker(worker, alive=kind == "back", token=100 + number)
        else:
            looks.change(now_ms=looks.snapshot.now_ms + 1000 * drawn.choice([1, 11]))
        looks.look(ready=drawn.random() < 0.8)
    for worker in [worker.id for worker in looks.snapshot.workers]:
        looks.worker(worker, alive=True, token=999)
    looks.job("first", checkpointed=True)
    looks.settle(within=40)
    if looks.snapshot.jobs:  # it has not failed for a mesh that was too small for too long
        assert {"core", "rollout"} <= set(looks.roles("first").values())


def step(
    looks: Looks, drawn: random.Random, number: int, degrees: Sequence[tuple[int, ...]]
) -> None:
    """One thing happens to jobs, to a worker, or to the clock."""
    snapshot, kind = looks.snapshot, drawn.choice(KINDS)
    worker = drawn.choice(snapshot.workers).id
    ids = [planned.id for planned in snapshot.jobs]
    if kind == "comes" and len(ids) < 5:
        some = drawn.choice(degrees)
        more = job(
            f"j{number}",
            degrees=some,
            alternates=some[0] == 1,
            ranks=drawn.choice([1, 1, 2, 3]),
            priority=drawn.randint(0, 3),
            phase=Phase.QUEUED,
            submitted_ms=number,
            checkpointed=drawn.random() < 0.6,
        )
        looks.change(jobs=(*snapshot.jobs, more))
    elif kind == "ends" and ids:
        gone = drawn.choice(ids)
        looks.change(jobs=tuple(planned for planned in snapshot.jobs if planned.id != gone))
    elif kind in ("dies", "back"):
        looks.worker(worker, alive=kind == "back", token=100 + number)
    elif kind == "idle":
        role = drawn.choice([Role.IDLE, Role.ROLLOUT])
        asked = PoolRequest(f"op{number}", "move", worker, role, drawn.choice(ids or [""]))
        looks.change(requests=(*snapshot.requests, asked))
    elif kind == "later":
        looks.change(now_ms=snapshot.now_ms + 1000 * drawn.choice([1, 11, 130]))
    elif kind == "saved" and ids:
        looks.job(drawn.choice(ids), checkpointed=True)


def resident(id: str, of: str, role: Role, *ranks: int, tier: Tier = Tier.ACCELERATOR) -> Resident:
    core = role == Role.TRAINING
    return Resident(id, of, role, core, ranks, tier, changed_ms=NOW_MS)


def gangs(*found: Gang) -> tuple[Gang, ...]:
    return tuple(settled(gang) for gang in found)


def test_who_shares_a_gang_with_workers_that_another_core_needs_is_removed_before_it_ends() -> None:
    """g0 has a core that sleeps on both of its workers, and another job's engine on the second."""
    asleep = resident("g0.0", "a", Role.TRAINING, 0, 1, tier=Tier.DISK)
    engine = resident("g0.1", "d", Role.ROLLOUT, 1)
    there = gangs(
        Gang("g0", ("w0", "w1"), 1, (asleep, engine), placed=2),
        Gang("g1", ("w2",), 1, (resident("g1.0", "d", Role.TRAINING, 0),), placed=1),
    )
    jobs = (
        job("b", ranks=2, rolls_out=False, priority=9, phase=Phase.QUEUED),
        job("d", priority=5, submitted_ms=1),
        job("a", ranks=2, rolls_out=False, submitted_ms=2, checkpointed=True),
    )
    looks = Looks(replace(pool([4], *jobs, gangs_formed=2), gangs=there))
    decisions = looks.look()
    gone = {d.resident for d in decisions if isinstance(d, Remove)}
    core = next(d for d in decisions if isinstance(d, Place) and d.resident.core)
    assert gone == {"g0.0", "g0.1"} and core.resident.job == "b"
    looks.change(requests=(PoolRequest("op", "move", "w1", Role.IDLE),))
    looks.settle()
    assert looks.roles("d") == {"w2": "core+rollout"}, "w1 was put aside, and the planner lives"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_gang_that_a_core_computes_in_is_broken_up_once_a_checkpoint_has_it(
    checkpointed: bool,
) -> None:
    """Its second worker has an engine that makes way; the first one's core needs a new gang."""
    core, engine = resident("g0.0", "d", Role.TRAINING, 0), resident("g0.1", "d", Role.ROLLOUT, 1)
    there = gangs(Gang("g0", ("w0", "w1"), 1, (core, engine), placed=2))
    jobs = (
        job("b", ranks=2, rolls_out=False, priority=9, phase=Phase.QUEUED),
        job("d", submitted_ms=1, checkpointed=checkpointed),
    )
    looks = Looks(replace(pool([3], *jobs, gangs_formed=1), gangs=there))
    looks.settle()
    assert looks.roles("d") == {"w0": "core+rollout"}
    if checkpointed:
        assert looks.roles("b") == {"w1": "core", "w2": "core"}
    else:
        assert "g0.0" in {r.id for _, r in looks.residents("d")}
        assert looks.snapshot.jobs[0].held.startswith("waiting: its core needs 2 of host0")
        looks.job("d", checkpointed=True)
        looks.settle()
    assert looks.workers_of("b") == 2 and looks.snapshot.jobs[0].held == ""


@pytest.mark.parametrize(
    ("lost", "stays"), [("w1", {"g0.1", "g0.2"}), ("w2", {"g0.0", "g0.2"}), ("w0", set())]
)
def test_who_has_lost_no_rank_stays_while_who_gives_turns_is_there(
    lost: str, stays: set[str]
) -> None:
    """Three workers: a core that sleeps on the first two, an engine of another job on the last."""
    here = (
        resident("g0.0", "a", Role.TRAINING, 0, 1, tier=Tier.DISK),
        resident("g0.1", "d", Role.ROLLOUT, 2),
        resident("g0.2", "d", Role.TRAINING, 0),
    )
    there = gangs(Gang("g0", ("w0", "w1", "w2"), 1, here, placed=3))
    jobs = (
        job("d", priority=5, least=2),
        job("a", ranks=2, rolls_out=False, least=3, submitted_ms=2),
    )
    looks = Looks(replace(pool([3], *jobs, gangs_formed=1), gangs=there))
    looks.worker(lost, alive=False)
    looks.settle()
    looks.change(now_ms=looks.snapshot.now_ms + 11_000)
    looks.settle()
    left = {r.id for gang in looks.snapshot.gangs for r in gang.residents}
    assert left & {r.id for r in here} == stays
