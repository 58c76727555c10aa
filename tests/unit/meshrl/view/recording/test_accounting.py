"""Totals of a run's record: groups in flight at its end, seconds used, waited and paused."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.files import json_lines
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.registry import RegistryEntry
from meshrl.directory.directory_paths import read_json, write_json
from meshrl.runs.session import choose_exit_status
from meshrl.view.health.findings import find_problems
from meshrl.view.health.run_figures import collect_figures
from meshrl.view.history.blocked_jobs import sum_blocked_s
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.process_usage import CpuMeter, ProcessCpuTime, find_owner_job
from meshrl.view.recording.audit import audit_run, find_open_groups, print_audit
from meshrl.view.recording.job_usage import JobUsage, count_accelerators

LATE_MS = 60_000


def make_events(*told: tuple[int, str, dict[str, Any]]) -> list[Event]:
    return [
        Event(f"{n}-0", ms, kind, {"job": "j"} | fields)
        for n, (ms, kind, fields) in enumerate(told)
    ]


def open_groups(ms: int, *groups: int) -> tuple[int, str, dict[str, Any]]:
    return ms, "opened", {"groups": list(groups), "samples": 4}


def step(number: int, *groups: int) -> tuple[int, str, dict[str, Any]]:
    return LATE_MS, "step", {"step": number, "groups": [{"group": g} for g in groups]}


def test_finished_untrained_groups_are_in_flight() -> None:
    told = make_events(
        open_groups(0, 1, 2), (1, "ready", {"group": 1}), (2, "ready", {"group": 2}), step(1, 1)
    )
    assert find_open_groups(told, "j", set()) == {2: 4}


def test_ledger_groups_are_in_flight_until_their_outcome() -> None:
    told = make_events(open_groups(0, 1, 2, 3), (LATE_MS, "dropped", {"group": 3}))
    assert find_open_groups(told, "j", {1, 2, 3}) == {1: 4, 2: 4}


def test_unrecorded_group_is_lost_unless_it_is_recent() -> None:
    told = make_events(open_groups(0, 1), open_groups(LATE_MS - 10, 2), step(1))
    assert find_open_groups(told, "j", set()) == {2: 4}


def test_groups_of_an_abandoned_step_are_in_flight_again() -> None:
    told = make_events(
        open_groups(0, 1, 2),
        (1, "ready", {"group": 1}),
        (1, "ready", {"group": 2}),
        step(1, 1),
        step(2, 2),
        (LATE_MS, "lineage", {"version": 1}),
    )
    assert find_open_groups(told, "j", set()) == {2: 4}


def test_restored_job_starts_without_groups() -> None:
    told = make_events(open_groups(LATE_MS, 1), (LATE_MS, "restored", {"counts": {}}))
    assert find_open_groups(told, "j", {1}) == {}


NO_SIGNAL = {"step": 1, "reward": 0.0, "sequences": 0}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("", [open_groups(0, 1), step(1, 1)]),
        ("lost", [open_groups(0, 1, 2), step(1, 1)]),
        ("trained_twice", [open_groups(0, 1), step(1, 1), step(2, 1)]),
        ("opened_twice", [open_groups(0, 1), step(1, 1), open_groups(LATE_MS, 1)]),
    ],
)
def test_wrong_accounting_fails_the_run_with_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, told: list[Any]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"job": "j", "document": {}}))
    rows = [asdict(event) for event in make_events(*told)]
    for row in rows:
        for group in row["fields"]["groups"] if row["kind"] == "step" else []:
            group.update(samples=4, scored=4, filtered=False)
    written = b"".join(json_lines.encode_row(row, number) for number, row in enumerate(rows))
    (tmp_path / "events.jsonl").write_bytes(written)
    assert print_audit(tmp_path, as_json=True) == (1 if what else 0)
    output = capsys.readouterr().err
    found = audit_run(tmp_path)
    assert choose_exit_status(found, Phase.FINISHED, gave_up=False) == (1 if what else 0)
    assert choose_exit_status(found, Phase.STOPPED, gave_up=False) == (1 if what else 130)
    (learned_nothing,) = find_problems(collect_figures([NO_SIGNAL]), {}, is_over=True)
    found["health"] = [learned_nothing.to_document()]
    assert choose_exit_status(found, Phase.FINISHED, gave_up=False) == (1 if what else 4)
    assert choose_exit_status(found, Phase.STOPPED, gave_up=False) == (1 if what else 130)
    if what:
        assert found[what] and f"{what} = {found[what]}" in output and "Start over" in output


OWNERS = {"trainer/a": "a", "trainer/b": "b"}


def make_cpu_times(**cpu_s: float) -> list[ProcessCpuTime]:
    """Make CPU times of processes whose keys give their names."""
    names = {"a": "trainer/a", "b": "trainer/b", "redis": "redis", "fork": "fork-server"}
    return [ProcessCpuTime(key, names[key], seconds) for key, seconds in cpu_s.items()]


def test_usage_adds_up_over_incarnations_and_sessions(tmp_path: Path) -> None:
    tally, meter = JobUsage(), CpuMeter()
    tally.update_tokens("rollout/a/0", "first", 100)
    tally.update_tokens("rollout/a/0", "first", 150)
    tally.update_tokens("rollout/a/0", "second", 10)
    tally.update_tokens("engine/g1.0", "third", 1000)
    tally.update_processes(meter.read({os.getpid(): "meshrl"}, [os.getpid()]), {}, "a")
    tally.accelerator_s = 3.5
    tally.write(tmp_path / "usage.json", 12.5)
    again = JobUsage.read(tmp_path / "usage.json")
    assert again.sum_tokens("rollout/") == 160
    assert (again.wall_s, again.accelerator_s) == (12.5, 3.5)
    assert again.sum_cpu_by_name()["meshrl"] > 0


def test_process_named_after_its_start_is_counted_once() -> None:
    tally, meter, me = JobUsage(), CpuMeter(), os.getpid()
    owners = {"engine/g0.0": "a"}
    tally.update_processes(meter.read({}, [me]), owners, "a")
    before = sum(tally.sum_cpu_by_name().values())
    tally.update_processes(meter.read({me: "engine/g0.0"}, [me]), owners, "a")
    # without a lease, a process has its own name
    tally.update_processes(meter.read({}, [me]), owners, "a")
    found = tally.sum_cpu_by_name()
    assert found["engine/g0.0"] >= before > 0
    assert sum(found.values()) == found["engine/g0.0"]


def test_jobs_share_only_common_processes() -> None:
    a, b = JobUsage(), JobUsage()
    # b has not started yet
    a.update_processes(make_cpu_times(a=1.0, redis=2.0), OWNERS, "a", job_count=1)
    for look in (
        make_cpu_times(a=4.0, b=10.0, redis=2.0),
        make_cpu_times(a=5.0, b=11.0, redis=6.0),
    ):
        a.update_processes(look, OWNERS, "a", job_count=2)
        b.update_processes(look, OWNERS, "b", job_count=2, counts_earlier_use=False)
    assert a.sum_cpu_by_name() == {"redis": 4.0, "trainer/a": 5.0}
    assert b.sum_cpu_by_name() == {"redis": 2.0, "trainer/b": 11.0}
    assert (a.shared_s, b.shared_s) == (4.0, 2.0)


def test_forked_process_of_another_job_is_subtracted() -> None:
    a = JobUsage()
    a.update_processes(make_cpu_times(fork=3.0, redis=1.0), OWNERS, "a", job_count=1)
    assert a.sum_cpu_by_name() == {"fork-server": 3.0, "redis": 1.0}
    a.update_processes([ProcessCpuTime("fork", "trainer/b", 4.0)], OWNERS, "a", job_count=2)
    assert a.sum_cpu_by_name() == {"fork-server": 0.0, "redis": 1.0}


def test_owner_job_comes_from_process_name_or_stats() -> None:
    engine = RegistryEntry(name="engine/g1.0", kind="engine", stats={"job": "a"})
    worker = RegistryEntry(name="worker/w1", kind="worker", stats={"job": "a"})
    shard = RegistryEntry(name="rollout/b/0", kind="rollout")
    assert [find_owner_job(entry) for entry in (engine, worker, shard)] == ["a", "", "b"]


def make_instance(
    id: str, job: str, *ranks: int, tier: Tier = Tier.ACCELERATOR, turns: bool = False
) -> Instance:
    reports = {rank: InstanceReport(rank, 1, 1, 7, InstancePhase.READY, tier) for rank in ranks}
    return Instance(id, job, Role.ROLLOUT, ranks=ranks, time_sliced=turns, reports=reports)


def mesh(*gangs: Gang) -> MeshSnapshot:
    names = sorted({worker for gang in gangs for worker in gang.workers})
    return MeshSnapshot(tuple(WorkerRow(name, "h0", "cpu:0", 7) for name in names), gangs)


TWO = Gang("g0", ("w0", "w1"), 1, (make_instance("g0.0", "a", 0, 1),))
BOTH = Gang("g1", ("w2",), 1, (make_instance("g1.0", "a", 0), make_instance("g1.1", "b", 0)))
ASLEEP = Gang("g2", ("w3",), 1, (make_instance("g2.0", "a", 0, tier=Tier.MEMORY),))


def test_accelerators_are_charged_to_the_instances_in_their_memory() -> None:
    a, b = JobUsage(), JobUsage()
    for now_s in (10.0, 20.0, 30.0):
        for tally, job in ((a, "a"), (b, "b")):
            tally.update_workers(mesh(TWO, BOTH, ASLEEP), job, now_s)
    assert a.accelerator_s == pytest.approx(20 * 2.5)
    assert b.accelerator_s == pytest.approx(20 * 0.5)


def test_time_sliced_instance_is_charged_its_compute_time() -> None:
    a, alone = JobUsage(), JobUsage()
    both = (make_instance("g1.0", "a", 0, turns=True), make_instance("g1.1", "b", 0, turns=True))
    by_turns = Gang("g1", ("w2",), 1, both)
    for now_s, turn_s in ((10.0, 4.0), (20.0, 5.5), (30.0, 7.0)):
        said = {"instance": "g1.0", "job": "a", "turn_held_s": turn_s}
        entry = RegistryEntry("engine/g1.0", "engine", incarnation="i", alive=True, stats=said)
        a.update_workers(replace(mesh(by_turns), entries=[entry]), "a", now_s)
        alone.update_workers(replace(mesh(BOTH), entries=[entry]), "a", now_s)
    assert alone.accelerator_s == pytest.approx(10.0), "it takes no turns"
    assert a.accelerator_s == pytest.approx(3.0), "what it had computed before is another's count"


def test_cost_counts_each_worker_by_its_price() -> None:
    a, b = JobUsage(), JobUsage()
    settings = PoolSettings(reserved_price=2.0, spot_price=0.5)
    markets = {"w0": "reserved", "w1": "spot", "w2": "spot", "w4": "lent"}
    rows = [WorkerRow(name, "h0", "cpu:0", 7, market=of) for name, of in markets.items()]
    rows[2] = replace(rows[2], price=3.0)  # its own
    sliced = Gang("g4", ("w0",), 1, (make_instance("g4.0", "b", 0, turns=True),))
    for now_s, held_s in ((0.0, 10.0), (3600.0, 1810.0)):
        said = {"instance": "g4.0", "turn_held_s": held_s}
        entry = RegistryEntry("trainer/b", "trainer", incarnation="i", alive=True, stats=said)
        found = replace(
            mesh(TWO, BOTH, ASLEEP, sliced), workers=tuple(rows), settings=settings, entries=[entry]
        )
        a.update_workers(found, "a", now_s)
        b.update_workers(found, "b", now_s)
    assert count_accelerators(found, "a") == (2.5, 2.0 + 0.5 + 3.0 / 2)
    assert a.cost == pytest.approx(4.0), "an hour, and a core without a slice shares its worker"
    assert b.cost == pytest.approx(3.0 / 2 + 2.0 * 0.5), "half an hour of slices"


def test_slices_of_all_processes_of_a_job_are_summed_by_function(tmp_path: Path) -> None:
    gang = Gang("g0", ("w0", "w1"), 1, (make_instance("g0.0", "a", 0, 1, turns=True),))
    tally = JobUsage()
    assert tally.sum_slices() == {}
    for incarnation, train_s in (("i", 1.0), ("i", 2.0), ("restarted", 0.5)):
        stats = {"instance": "g0.0", "turns": 3, "turn_wait_s": 0.5, "slice_switch_s": 0.25}
        stats |= {"slice_s": {"train_step": train_s}, "slice_loaded_bytes": 10}
        stats |= {"slice_hidden_bytes": 30}
        entry = RegistryEntry("trainer/a", "trainer", incarnation=incarnation, stats=stats)
        other = replace(entry, incarnation="other", stats=stats | {"instance": "g9.0"})
        tally.update_workers(replace(mesh(gang), entries=[entry, other]), "a", 10.0)
    tally.write(tmp_path / "usage.json", 0.0)
    assert JobUsage.read(tmp_path / "usage.json").sum_slices() == {
        "by_function_s": {"train_step": 5.0},  # on two accelerators
        "wait_s": 2.0,
        "switch_s": 1.0,
        "hidden_share": 0.75,
    }
    document = read_json(tmp_path / "usage.json")
    del document["slices"]  # of an earlier version
    write_json(tmp_path / "usage.json", document)
    assert JobUsage.read(tmp_path / "usage.json").sum_slices() == {}


def admission(second: int, held: str) -> Event:
    fields = {"job": "a", "held": held, "rule": "r"}
    return Event(f"{second}-0", second * 1000, "admission", fields)


EVENTS = [
    admission(10, "waiting: no worker is free"),
    admission(40, "paused: b goes first"),
    admission(100, ""),
    admission(200, "paused: b goes first"),
]


def test_blocked_time_lasts_until_the_next_state_or_the_end() -> None:
    assert sum_blocked_s(EVENTS, "a") == {"waiting": 30.0, "paused": 60.0}
    assert sum_blocked_s(EVENTS, "a", 230_000) == {"waiting": 30.0, "paused": 90.0}


def test_blocked_time_excludes_periods_without_a_mesh(tmp_path: Path) -> None:
    tally = JobUsage()
    for began, last in ((0, 15), (0, 20), (30, 50), (90, 300)):
        tally.update_session(began * 1000, last * 1000)
        tally.write(tmp_path / "usage.json", 0.0)
        tally = JobUsage.read(tmp_path / "usage.json")
    assert sum_blocked_s(EVENTS, "a", 230_000, tally.sessions) == {"waiting": 20.0, "paused": 50.0}
