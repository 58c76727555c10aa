"""Repair and report of corrupt record files, between sessions and while a job runs."""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.files.corruption import (
    CORRUPTION_EVENT,
    QUARANTINE_DIRECTORY,
    make_event_fields,
)
from meshrl.common.base.files.json_lines import read_lines
from meshrl.common.job.config import JobConfig
from meshrl.common.state import events, jobs, readers
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state.rollback import JobWatermark
from meshrl.directory.command_target import read_run
from meshrl.directory.directory_paths import MeshPaths, read_json, write_json
from meshrl.launch.head.job_restore import restore_job
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.runs.outcome import read_outcome
from meshrl.sim.redis.simulated_state import open_simulated_state_as
from meshrl.view.recording.recorder import Recorder
from meshrl.view.recording.run_record import RunRecordWriter, read_events
from meshrl.view.report import report
from tests.load import scaled

JOB = "one"


def flip(path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path, _: Path) -> None:
    path.unlink()


def restore_older_copy(path: Path, copy: Path) -> None:
    path.write_bytes(copy.read_bytes())


HARM: dict[str, Callable[[Path, Path], None]] = {
    harm.__name__: harm for harm in (flip, truncate, empty, delete, restore_older_copy)
}


class Run:
    """Recorded job on a mesh without processes."""

    def __init__(self, directory: Path, state: type[StateClient] = StateClient) -> None:
        self.directory = directory
        self.launcher = Launcher(MeshPaths(directory), MeshShape())
        self.launcher.state = open_simulated_state_as(state, self.launcher.clock)

    async def begin(self) -> None:
        document = JobConfig(name=JOB).to_document()
        write_json(self.directory / "job.json", {"job": JOB, "document": document})
        await jobs.submit(self.launcher.state, JOB, document, str(self.directory), JOB)

    async def append_events(self, *texts: str) -> None:
        for text in texts:
            await events.append(self.launcher.state, "note", {"job": JOB, "text": text})

    def recorder(self) -> Recorder:
        return Recorder(self.launcher, JOB, self.directory)

    @property
    def notes(self) -> list[str]:
        return [e.fields["text"] for e in read_events(self.directory) if e.kind == "note"]

    def read_corruption_events(self) -> list[dict[str, Any]]:
        return [e.fields for e in read_events(self.directory) if e.kind == CORRUPTION_EVENT]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(tmp_path / "run")
    await made.begin()
    yield made
    await made.launcher.state.close()


async def test_corruption_between_sessions_is_in_record_report_and_status(
    run: Run,
) -> None:
    recorder = run.recorder()
    await run.append_events("a")
    await recorder.poll()
    await recorder.close()
    lost = make_event_fields("redis", run.directory / "mesh/redis", "it is empty", "set aside")
    [last] = [e.id for e in read_events(run.directory)][-1:]
    await run.launcher.state.close()
    # another Redis, without the job
    run.launcher.state = open_simulated_state_as(StateClient, run.launcher.clock)
    await events.append(run.launcher.state, CORRUPTION_EVENT, lost, after_id=last)
    await restore_job(
        run.launcher.state,
        run.directory,
        JOB,
        recorder.job_file_content["document"],
        JobWatermark(0, 1),
    )
    recorder = run.recorder()
    await recorder.poll()
    assert run.read_corruption_events() == [lost]
    assert [e.kind for e in read_events(run.directory)][-2:] == [CORRUPTION_EVENT, "restored"]
    await report.write_results(recorder)
    assert "is corrupt: it is empty" in (run.directory / "report.html").read_text()
    assert (
        "is corrupt: it is empty"
        in read_outcome(read_run(run.directory), is_live=False).format_lines()[-1]
    )


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("at_rest", [True, False], ids=["at rest", "in mid-run"])
async def test_events_are_restored_from_the_stream(run: Run, harm: str, at_rest: bool) -> None:
    path, copy = run.directory / "events.jsonl", run.directory / "copy"
    recorder = run.recorder()
    await run.append_events("a", "b")
    await recorder.poll()
    shutil.copy(path, copy)
    await run.append_events("c", "d", "e")
    await recorder.poll()
    if at_rest:
        await recorder.close()
    HARM[harm](path, copy)
    if at_rest:
        recorder = run.recorder()
    await run.append_events("f")
    for _ in range(2):  # the next poll records the repair
        assert await recorder.poll() is not None
    assert run.notes == ["a", "b", "c", "d", "e", "f"]
    assert not read_lines(path).corruption
    (event,) = run.read_corruption_events()
    assert (event["what"], event["path"]) == ("events", str(path))
    assert "rebuilt from the event stream" in event["then"]
    assert (run.directory / QUARANTINE_DIRECTORY / "events.jsonl").exists() == (harm != "delete")
    assert [e.kind for e in read_events(run.directory)].count(CORRUPTION_EVENT) == 1


async def test_events_trimmed_from_redis_are_reported_as_lost(run: Run) -> None:
    path = run.directory / "events.jsonl"
    recorder = run.recorder()
    await run.append_events("a", "b", "c", "d", "e")
    await recorder.poll()
    await recorder.close()
    assert await readers.trim_events(run.launcher.state, 0, retention_ms=0) > 0
    flip(path, path)
    recorder = run.recorder()
    for _ in range(2):
        assert await recorder.poll() is not None
    (event,) = run.read_corruption_events()
    assert "1 of its events are lost" in event["then"]
    assert len(run.notes) in (4, 5) and not read_lines(path).corruption
    assert [e.kind for e in read_events(run.directory)].count("history_lost") == 1


class UnreachableRedis(StateClient):
    """Redis that fails the first two queries for lost events."""

    tries = 2

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        if script == "record_history_loss" and self.tries:
            self.tries -= 1
            raise StateUnavailable("Redis does not answer")
        return await super().run_script(script, keys, *args)


async def test_repair_without_redis_quarantines_one_file_only(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run", UnreachableRedis)
    await run.begin()
    record_events(run.directory, 3)
    path = run.directory / "events.jsonl"
    flip(path, path)
    recorder = run.recorder()
    for _ in range(5):
        await recorder.poll()
    assert [p.name for p in (run.directory / QUARANTINE_DIRECTORY).iterdir()] == ["events.jsonl"]
    assert [event["what"] for event in run.read_corruption_events()] == [
        "events"
    ] and not read_lines(path).corruption
    assert [e.kind for e in read_events(run.directory)].count("history_lost") == 1
    await run.launcher.state.close()


class Deadlines(SystemClock):
    """Clock that counts the active deadlines."""

    running = 0

    @asynccontextmanager
    async def timeout(self, seconds: float, what: str) -> AsyncIterator[None]:
        self.running += 1
        try:
            async with super().timeout(seconds, what):
                yield
        finally:
            self.running -= 1


async def test_long_repair_has_no_deadline_and_keeps_the_loop_responsive(run: Run) -> None:
    record_events(run.directory, 3000)
    path = run.directory / "events.jsonl"
    flip(path, path)
    run.launcher.clock = clock = Deadlines()
    recorder = run.recorder()
    turns, most = 0, 0
    looking = asyncio.create_task(recorder.poll())
    while not looking.done() and not (run.directory / QUARANTINE_DIRECTORY).exists():
        turns, most = turns + 1, max(most, clock.running)
        await asyncio.sleep(0)
    assert turns > 100, "the file is read and written while others have their turns"
    assert most == 0, "however long that takes"
    assert await looking is not None
    assert not read_lines(path).corruption


def record_events(directory: Path, count: int) -> None:
    """Record events that Redis does not have."""
    rows = [
        events.Event(f"{n}-0", n, "note", {"job": JOB, "text": str(n)}) for n in range(1, count + 1)
    ]
    RunRecordWriter(directory, JOB).add_events(rows)


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty"])
@pytest.mark.parametrize("name", ["usage.json", "in_flight.json", "tracking.json"])
async def test_corrupt_document_is_quarantined_and_the_run_continues(
    run: Run, name: str, harm: str
) -> None:
    recorder = run.recorder()
    await recorder.poll()
    await recorder.close()
    path = run.directory / name
    if not path.exists():
        write_json(path, {"tensorboard": {"id": "one-1234"}})
    HARM[harm](path, path)
    recorder = run.recorder()
    assert await recorder.poll() is not None
    (event,) = run.read_corruption_events()
    assert event["path"] == str(path) and Path(event["aside"]).parent.name == QUARANTINE_DIRECTORY
    await recorder.close()


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "delete"])
async def test_job_file_is_restored_while_the_run_continues(run: Run, harm: str) -> None:
    recorder = run.recorder()
    await recorder.poll()
    path = run.directory / "job.json"
    before = read_json(path)
    HARM[harm](path, path)
    await recorder.poll()
    assert read_json(path) == before
    (event,) = run.read_corruption_events()
    assert event["then"] == "rewritten from memory"


async def test_torn_tail_is_repaired_silently(run: Run) -> None:
    path = run.directory / "events.jsonl"
    recorder = run.recorder()
    await run.append_events("a", "b")
    await recorder.poll()
    content = path.read_bytes()
    path.write_bytes(content[:-20])  # a crash leaves no mark of a clean end
    assert read_lines(path).corruption == "" and path.read_bytes() == content[:-20], (
        "a reader cuts nothing"
    )
    recorder = run.recorder()
    await recorder.poll()
    assert run.notes == ["a", "b"] and not run.read_corruption_events()


async def test_end_of_a_run_waits_for_disk_space_and_loses_nothing(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = run.recorder()
    await run.append_events("a")
    await recorder.poll()
    await run.append_events("b", "c")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file of this process can grow
    try:
        ending = asyncio.create_task(recorder.close())
        said = ""
        async with asyncio.timeout(scaled(20)):
            while "waiting for disk space" not in said:
                await asyncio.sleep(0.01)
                said += capsys.readouterr().err
        assert not ending.done() and "bytes" in said and str(run.directory) in said
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    async with asyncio.timeout(scaled(20)):
        await ending
        await report.write_results(recorder)
    assert run.notes == ["a", "b", "c"]
    assert read_json(run.directory / "in_flight.json")["events"] == len(read_events(run.directory))
    assert read_json(run.directory / "summary.json")["job"] == JOB


async def test_stopping_mesh_leaves_the_rest_to_the_next_start(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = run.recorder()
    await recorder.poll()
    await run.append_events("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        async with asyncio.timeout(scaled(20)):
            await recorder.close(lambda: True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.notes == [] and "waiting for disk space" in capsys.readouterr().err
    recorder = run.recorder()
    await recorder.poll()
    assert run.notes == ["a"] and not run.read_corruption_events()


def write_trained_run(directory: Path, steps: int) -> RunRecordWriter:
    """Write the record of a run that has trained this many steps."""
    recorded = RunRecordWriter(directory, JOB)
    for step in range(1, steps + 1):
        recorded.add_rows([{"step": step}])
        at = events.Event(f"{step}-0", step, "step", {"job": JOB, "step": step, "groups": []})
        recorded.add_events([at])
    return recorded


@pytest.mark.parametrize("harm", HARM)
async def test_missing_metrics_steps_are_reported_and_the_rest_is_kept(run: Run, harm: str) -> None:
    path, copy = run.directory / "metrics.jsonl", run.directory / "copy"
    write_trained_run(run.directory, 2)
    shutil.copy(path, copy)
    path.unlink()
    (run.directory / "events.jsonl").unlink()
    write_trained_run(run.directory, 5)
    HARM[harm](path, copy)
    recorded = RunRecordWriter(run.directory, JOB)
    assert list(recorded.faults) == ["metrics.jsonl"]
    report = await recorded.repair_metrics(run.launcher.state, run.launcher.host)
    assert report["what"] == "metrics"
    assert not read_lines(path).corruption


def test_steps_of_an_abandoned_lineage_are_not_reported_missing(run: Run) -> None:
    recorded = write_trained_run(run.directory, 5)
    recorded.truncate_rows(2)
    recorded.add_events([events.Event("9-0", 9, "lineage", {"job": JOB, "version": 2})])
    assert not RunRecordWriter(run.directory, JOB).faults
