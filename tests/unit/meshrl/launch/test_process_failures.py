"""Failures of processes and hosts: restart budgets, absent hosts, forced stops and records."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import PeerLost, StateUnavailable, StorageFull
from meshrl.common.base.files import json_lines
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.supervision.exit_reports import ExitReportSender
from meshrl.common.mesh.process.supervision.supervisor import ChildExit, ChildSpec
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.server_state.rollback import JobWatermark, StateWatermark
from meshrl.directory.directory_paths import MeshPaths, find_root_pid
from meshrl.launch.head.host_admission import AbsenceTracker
from meshrl.launch.redis.run_watermark import RunRecordReader, read_run_watermark
from meshrl.launch.services.restart_policy import (
    PROGRESS_WINDOW_S,
    RECOVERY_TIMEOUT_S,
    should_reset_budget,
)
from meshrl.launch.shutdown import STOP_TIMEOUT_S, stop_root_process
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.load import scaled
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.unit.node.test_failing_roles import DOCUMENT

SPEC = ChildSpec("rollout/job/0", [])
ODD = ChildExit(1, "exit status 1", Failure.from_error(ValueError("odd")))
LOST = ChildExit(1, "exit status 1", Failure.from_error(PeerLost("gone")))
Decide = Callable[[ChildExit], Awaitable[bool]]


def with_mesh(check: Callable[[Mesh, Clock, Decide], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        mesh = alone("launcher", clock, random, SimulatedHost(clock, random))
        reports = ExitReportSender(mesh.state, clock)

        async def decide(end: ChildExit, full: str = "") -> bool:
            return await should_reset_budget(mesh.state, reports, SPEC, end, full)

        await check(mesh, clock, decide)

    run_virtual(main)


def test_mesh_whose_jobs_make_no_progress_is_given_up(tmp_path: Path) -> None:
    async def check(mesh: Mesh, clock: Clock, decide: Decide) -> None:
        assert not await decide(ODD), "there is no job"
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        assert await decide(ODD)
        await clock.sleep(PROGRESS_WINDOW_S + 1.0)
        assert not await decide(ODD)

    with_mesh(check)


def test_lost_peer_is_awaited_for_a_limited_time(tmp_path: Path) -> None:
    async def check(mesh: Mesh, clock: Clock, decide: Decide) -> None:
        assert await decide(replace(LOST, repeating_for_s=RECOVERY_TIMEOUT_S - 1.0))
        assert not await decide(replace(LOST, repeating_for_s=RECOVERY_TIMEOUT_S + 1.0))
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        assert await decide(replace(LOST, repeating_for_s=RECOVERY_TIMEOUT_S + 1.0)), (
            "a job came further"
        )

    with_mesh(check)


def test_outage_of_redis_or_disk_resets_the_restart_budget() -> None:
    async def check(mesh: Mesh, clock: Clock, decide: Decide) -> None:
        for error in (StorageFull("full"), StateUnavailable("away")):
            end = ChildExit(
                1,
                "exit status 1",
                Failure.from_error(error),
                repeating_for_s=10 * RECOVERY_TIMEOUT_S,
            )
            assert await decide(end)

    with_mesh(check)


def test_job_whose_errors_exhaust_the_budget_fails_alone(tmp_path: Path) -> None:
    async def check(mesh: Mesh, clock: Clock, decide: Decide) -> None:
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        await clock.sleep(PROGRESS_WINDOW_S + 1.0)
        assert await decide(
            ChildExit(1, "exit status 1", Failure.from_error(ValueError("odd"), job="calc"))
        )
        row = await jobs.read_job(mesh.state, "calc")
        assert row.phase == "failed" and "rollout/job/0 exited: ValueError: odd" in row.error

    with_mesh(check)


def test_host_is_absent_only_if_every_poll_missed_it() -> None:
    absences = AbsenceTracker(10.0)
    assert absences.find_absent(["a", "b"], ["a"], 100.0) == {}
    assert absences.find_absent(["a", "b"], [], 105.0) == {}
    assert absences.find_absent(["a", "b"], ["b"], 109.0) == {}, "it is back"
    assert absences.find_absent(["a", "b"], [], 116.0) == {"a": 11.0}
    assert absences.find_absent(["b"], [], 126.5) == {"b": 10.5}, (
        "one that is let out is looked at no more"
    )


def test_reset_restarts_the_absence_of_all_hosts() -> None:
    absences = AbsenceTracker(10.0)
    absences.find_absent(["a"], [], 100.0)
    absences.reset()
    assert absences.find_absent(["a"], [], 200.0) == {}
    assert absences.find_absent(["a"], [], 211.0) == {"a": 11.0}


WITHIN_S = 30.0
HOLDS = """
import signal, sys, time
from pathlib import Path
from meshrl.launch.directory_lock import DirectoryLock
from meshrl.directory.directory_paths import MeshPaths
place = MeshPaths(Path(sys.argv[1]))
def told(*_):
    (place.root / "asked").write_text(str(place.leave_marker.exists()))
signal.signal(signal.SIGTERM, told)
DirectoryLock(place, stop_timeout_s=float(sys.argv[2])).acquire()
while not (place.root / "asked").exists() or sys.argv[3] == "stays":
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("ends", "leaves"), [("stays", False), ("ends", True)])
def test_root_process_is_killed_after_its_stop_timeout(
    tmp_path: Path, ends: str, leaves: bool
) -> None:
    place = MeshPaths(tmp_path)
    place.directory.mkdir(mode=0o700)
    MeshSettings(redis_url="redis://127.0.0.1:1/0", run_root=str(tmp_path)).to_file(place.settings)
    end_s = 1.0 if ends == "stays" else 600.0
    words = [sys.executable, "-c", HOLDS, str(tmp_path), str(end_s), ends]
    holder = subprocess.Popen(words)
    try:
        until = time.monotonic() + scaled(WITHIN_S)
        while find_root_pid(place) != holder.pid:
            assert holder.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        started_s = time.monotonic()
        assert stop_root_process(place, leave_mesh=leaves) == (holder.pid, [])
        assert time.monotonic() - started_s < STOP_TIMEOUT_S
        assert holder.wait(scaled(WITHIN_S)) == (0 if ends == "ends" else -9)
        assert (tmp_path / "asked").read_text() == str(leaves)
    finally:
        holder.kill()
        holder.wait()


def line(number: int, kind: str, **fields: Any) -> str:
    told = {"id": f"{number}-0", "ms": number, "kind": kind, "fields": {"job": "j"} | fields}
    return json.dumps(told) + "\n"


def test_record_is_read_incrementally(tmp_path: Path) -> None:
    record, file = RunRecordReader(tmp_path, "j"), tmp_path / "events.jsonl"
    assert (
        record.read_watermark() == StateWatermark()
        and read_run_watermark(tmp_path, "j") == StateWatermark()
    )
    begun = line(1, "registered", job="", token=7) + line(2, "opened", groups=[3, 4])
    file.write_text(begun + line(3, "step", lineage=1, version=2)[:-9])
    run_dir = str(tmp_path)
    assert record.read_watermark() == StateWatermark(
        "2-0", 7, {"j": JobWatermark(next_group=5, run_dir=run_dir)}
    )
    file.write_text(begun + line(3, "step", lineage=1, version=2) + "no line\n")
    now = StateWatermark("3-0", 7, {"j": JobWatermark(1, 2, 5, run_dir)})
    assert record.read_watermark() == read_run_watermark(tmp_path, "j") == now
    with file.open("a") as more:
        more.write(line(4, "opened", job="another", groups=[99]) + line(5, "phase", phase="failed"))
    assert record.read_watermark() == StateWatermark(
        "5-0", 7, {"j": JobWatermark(1, 2, 5, run_dir, "failed")}
    )
    file.write_text(begun)  # rewritten from its first lines
    assert record.read_watermark().event == "5-0"


def test_corrupt_line_is_ignored(tmp_path: Path) -> None:
    events = [line(1, "step", lineage=0, version=2), line(2, "step", lineage=0, version=3)]
    events += [line(3, "opened", groups=[4]), line(4, "note")]
    written = [json_lines.encode_row(json.loads(event), n) for n, event in enumerate(events)]
    written[1] = written[1].replace(b'"version": 3', b'"version": 7')
    written[2] = written[2].replace(b"groups", b"grouqs")
    (tmp_path / "events.jsonl").write_bytes(b"".join(written))
    assert read_run_watermark(tmp_path, "j") == StateWatermark(
        "4-0", 0, {"j": JobWatermark(0, 2, run_dir=str(tmp_path))}
    )


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(line(1, "registered") + line(2, "note"))
    assert read_run_watermark(tmp_path, "j").event == "2-0"


def test_checkpoint_implies_the_version_before_its_own(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-002-000006-abcd.json").write_text("{}")
    found = read_run_watermark(tmp_path, "j").jobs["j"]
    assert (found.lineage, found.version) == (2, 5)
