"""What a job has used: its own processes whole, what serves all jobs in equal parts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.common.state.pool.workers.rows import (
    Doing,
    Gang,
    Report,
    Resident,
    Role,
    Tier,
    WorkerRow,
)
from meshrl.common.state.registry import Entry
from meshrl.view.mesh.processes import Meter, Used, owner
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.recording.usage import Tally

OWNERS = {"trainer/a": "a", "trainer/b": "b"}


def used(**cpu_s: float) -> list[Used]:
    """Processes by their keys, which tell their names."""
    names = {"a": "trainer/a", "b": "trainer/b", "redis": "redis", "fork": "nursery"}
    return [Used(key, names[key], seconds) for key, seconds in cpu_s.items()]


def test_the_tally_adds_up_over_incarnations_and_sessions(tmp_path: Path) -> None:
    tally, meter = Tally(), Meter()
    tally.see_tokens("rollout/a/0", "first", 100)
    tally.see_tokens("rollout/a/0", "first", 150)
    tally.see_tokens("rollout/a/0", "second", 10)
    tally.see_tokens("engine/g1.0", "third", 1000)
    tally.see_processes(meter.read({os.getpid(): "meshrl"}, [os.getpid()]), {}, "a")
    tally.accelerator_s = 3.5
    tally.write(tmp_path / "usage.json", 12.5)
    again = Tally.read(tmp_path / "usage.json")
    assert again.total_tokens("rollout/") == 160
    assert (again.wall_s, again.accelerator_s) == (12.5, 3.5)
    assert again.cpu_by_name()["meshrl"] > 0


def test_a_process_that_gets_its_name_late_is_counted_once() -> None:
    tally, meter, me = Tally(), Meter(), os.getpid()
    owners = {"engine/g0.0": "a"}
    tally.see_processes(meter.read({}, [me]), owners, "a")
    before = sum(tally.cpu_by_name().values())
    tally.see_processes(meter.read({me: "engine/g0.0"}, [me]), owners, "a")
    tally.see_processes(meter.read({}, [me]), owners, "a")  # without a lease its name is its own
    found = tally.cpu_by_name()
    assert found["engine/g0.0"] >= before > 0
    assert sum(found.values()) == found["engine/g0.0"]


def test_two_jobs_share_what_serves_both_and_nothing_else() -> None:
    a, b = Tally(), Tally()
    a.see_processes(used(a=1.0, redis=2.0), OWNERS, "a", among=1)  # b is not there yet
    for look in (used(a=4.0, b=10.0, redis=2.0), used(a=5.0, b=11.0, redis=6.0)):
        a.see_processes(look, OWNERS, "a", among=2)
        b.see_processes(look, OWNERS, "b", among=2, whole=False)
    assert a.cpu_by_name() == {"redis": 4.0, "trainer/a": 5.0}
    assert b.cpu_by_name() == {"redis": 2.0, "trainer/b": 11.0}
    assert (a.shared_s, b.shared_s) == (4.0, 2.0)


def test_a_fork_that_turns_out_to_be_another_job_s_is_given_back() -> None:
    a = Tally()
    a.see_processes(used(fork=3.0, redis=1.0), OWNERS, "a", among=1)
    assert a.cpu_by_name() == {"nursery": 3.0, "redis": 1.0}
    a.see_processes([Used("fork", "trainer/b", 4.0)], OWNERS, "a", among=2)
    assert a.cpu_by_name() == {"nursery": 0.0, "redis": 1.0}


def test_a_process_is_its_job_s_by_its_name_or_by_what_it_says() -> None:
    engine = Entry(name="engine/g1.0", kind="engine", stats={"job": "a"})
    worker = Entry(name="worker/w1", kind="worker", stats={"job": "a"})
    shard = Entry(name="rollout/b/0", kind="rollout")
    assert [owner(entry) for entry in (engine, worker, shard)] == ["a", "", "b"]


def resident(
    id: str, job: str, *ranks: int, tier: Tier = Tier.ACCELERATOR, turns: bool = False
) -> Resident:
    reports = {rank: Report(rank, 1, 1, 7, Doing.READY, tier) for rank in ranks}
    return Resident(id, job, Role.ROLLOUT, ranks=ranks, turns=turns, reports=reports)


def mesh(*gangs: Gang) -> MeshSnapshot:
    names = sorted({worker for gang in gangs for worker in gang.workers})
    return MeshSnapshot(tuple(WorkerRow(name, "h0", "cpu:0", 7) for name in names), gangs)


TWO = Gang("g0", ("w0", "w1"), 1, (resident("g0.0", "a", 0, 1),))
BOTH = Gang("g1", ("w2",), 1, (resident("g1.0", "a", 0), resident("g1.1", "b", 0)))
ASLEEP = Gang("g2", ("w3",), 1, (resident("g2.0", "a", 0, tier=Tier.MEMORY),))


def test_accelerators_are_charged_to_whose_tensors_are_on_them() -> None:
    a, b = Tally(), Tally()
    for now_s in (10.0, 20.0, 30.0):
        for tally, job in ((a, "a"), (b, "b")):
            tally.see_workers(mesh(TWO, BOTH, ASLEEP), job, now_s)
    assert a.accelerator_s == pytest.approx(20 * 2.5)
    assert b.accelerator_s == pytest.approx(20 * 0.5)


def test_a_resident_that_takes_turns_is_charged_what_it_computed() -> None:
    a, alone = Tally(), Tally()
    both = (resident("g1.0", "a", 0, turns=True), resident("g1.1", "b", 0, turns=True))
    by_turns = Gang("g1", ("w2",), 1, both)
    for now_s, turn_s in ((10.0, 4.0), (20.0, 5.5), (30.0, 7.0)):
        said = {"resident": "g1.0", "job": "a", "turn_held_s": turn_s}
        entry = Entry("engine/g1.0", "engine", incarnation="i", alive=True, stats=said)
        a.see_workers(replace(mesh(by_turns), entries=[entry]), "a", now_s)
        alone.see_workers(replace(mesh(BOTH), entries=[entry]), "a", now_s)
    assert alone.accelerator_s == pytest.approx(10.0), "it takes no turns"
    assert a.accelerator_s == pytest.approx(3.0), "what it had computed before is another's count"
