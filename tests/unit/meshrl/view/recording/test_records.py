"""Records of several jobs: faults of one job's record do not affect the others."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from asyncio import Event
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.files.corruption import CORRUPTION_EVENT
from meshrl.common.job.config import JobConfig, TrackingConfig
from meshrl.common.state import events, jobs
from meshrl.common.state.registry import RegistryEntry, register
from meshrl.directory.directory_paths import MeshPaths, read_json, write_json
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.runs.outcome import EXIT_INTERRUPTED
from meshrl.runs.session import _conclude
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.view import job_recorders
from meshrl.view.job_recorders import record_all
from meshrl.view.recording.recorder import Recorder
from meshrl.view.recording.run_record import RECORD_END_FILE, read_events
from meshrl.view.report import report
from tests.load import scaled

PATIENCE_S = 40.0
HANGING = """
import os, time
open(os.environ["HUNG"], "w").write(str(os.getpid()))
time.sleep(600)
"""


class RecordedMesh:
    """Launcher without processes, and the records of its mesh's jobs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launcher = Launcher(MeshPaths(directory), MeshShape())
        self.launcher.state = open_simulated_state(self.launcher.clock)
        self.stop = asyncio.Event()
        self.recording = asyncio.create_task(record_all(self.launcher, self.stop))

    async def submit(self, job: str, config: JobConfig | None = None) -> Path:
        run_dir = self.directory / job
        document = replace(config or JobConfig(), name=job).to_document()
        write_json(run_dir / "job.json", {"job": job, "document": document})
        await jobs.submit(self.launcher.state, job, document, str(run_dir), job)
        return run_dir

    async def note(self, job: str, text: str) -> None:
        await events.append(self.launcher.state, "note", {"job": job, "text": text})

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(scaled(PATIENCE_S)):
            while not condition():
                assert not self.recording.done(), self.recording.exception()
                await asyncio.sleep(0.01)

    async def await_note(self, run_dir: Path, text: str) -> None:
        """Wait until the event is in the record of the run."""

        def poll() -> bool:
            return any(e.fields.get("text") == text for e in read_events(run_dir))

        await self.until(poll, text)

    async def await_missing_record(self, job: str) -> None:
        async with asyncio.timeout(scaled(PATIENCE_S)):
            while not any(
                e.kind == "unrecorded" and e.fields["job"] == job
                for e in await events.read_all(self.launcher.state)
            ):
                assert not self.recording.done(), self.recording.exception()
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(scaled(PATIENCE_S)):
            await self.recording


@pytest.fixture
async def recorded_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RecordedMesh]:
    monkeypatch.setattr(job_recorders, "RETRY_S", 0.3)
    made = RecordedMesh(tmp_path)
    yield made
    if not made.recording.done():
        made.recording.cancel()
        await asyncio.wait([made.recording])
    await made.launcher.state.close()


def block_path(path: Path) -> None:
    """Put a file at a path so that nothing can be written below it, and remove it afterwards."""
    while True:
        try:
            return path.touch(exist_ok=False)
        except (FileExistsError, IsADirectoryError):
            shutil.rmtree(path)


async def test_deleted_run_directory_does_not_affect_other_jobs(
    recorded_mesh: RecordedMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = await recorded_mesh.submit("one"), await recorded_mesh.submit("other")
    await recorded_mesh.note("one", "first")
    await recorded_mesh.await_note(one, "first")
    one.rename(one.with_name("deleted"))  # immediately, perhaps while its report is being written
    block_path(one)
    await recorded_mesh.await_missing_record("one")
    await recorded_mesh.note("other", "second")
    await recorded_mesh.await_note(other, "second")
    one.unlink()
    write_json(one / "job.json", read_json(other / "job.json"))
    await recorded_mesh.await_note(one, "first")
    await recorded_mesh.end()
    assert read_json(one / "summary.json") and read_json(other / "summary.json")
    output = [
        line for line in capsys.readouterr().err.splitlines() if "one is not recorded" in line
    ]
    assert output and len(output) == len(set(output)), (
        "each trouble once, however often it was tried"
    )


async def test_report_exists_during_a_job_and_a_resumed_job_is_recorded_again(
    recorded_mesh: RecordedMesh,
) -> None:
    run_dir = await recorded_mesh.submit("one")
    page = run_dir / "report.html"
    await recorded_mesh.until(page.is_file, "the report of a run that goes on")
    assert "http-equiv" in page.read_text() and not (run_dir / "summary.json").exists()
    await jobs.cancel(recorded_mesh.launcher.state, "one", "cancelled")
    await recorded_mesh.until((run_dir / "summary.json").is_file, "the summary")
    assert read_json(run_dir / "summary.json")["phase"] == "stopped"
    assert "http-equiv" not in page.read_text()
    await jobs.reopen(recorded_mesh.launcher.state, "one", "reopened")
    await recorded_mesh.until(
        lambda: "http-equiv" in page.read_text(), "the report of the resumed run"
    )
    await recorded_mesh.note("one", "goes on")
    await recorded_mesh.await_note(run_dir, "goes on")
    await recorded_mesh.end()


@pytest.mark.parametrize("damage", ["{}", "no JSON", '{"job": "one"}'])
async def test_corrupt_job_file_is_restored_from_redis(
    recorded_mesh: RecordedMesh, damage: str
) -> None:
    one = recorded_mesh.directory / "one"
    one.mkdir()
    (one / "job.json").write_text(damage)
    document = JobConfig(name="one").to_document()
    await jobs.submit(recorded_mesh.launcher.state, "one", document, str(one), "one")
    await recorded_mesh.note("one", "first")
    await recorded_mesh.await_note(one, "first")
    held = read_json(one / "job.json")
    assert held == {"job": "one", "document": document, "mesh": str(recorded_mesh.directory)}
    (told,) = [e for e in read_events(one) if e.kind == CORRUPTION_EVENT]
    assert (one / "quarantine/job.json").read_text() == damage
    assert told.fields["path"] == str(one / "job.json")
    await recorded_mesh.end()


async def test_hanging_tracker_of_one_job_delays_no_other(
    recorded_mesh: RecordedMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(HANGING)
    hung = tmp_path / "hung"
    monkeypatch.setenv("HUNG", str(hung))
    root = Path(__file__).parents[5]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}{os.pathsep}{root}")
    state = recorded_mesh.launcher.state
    one = await recorded_mesh.submit("one", JobConfig(tracking=TrackingConfig(wandb="project")))
    other = await recorded_mesh.submit("other")
    evaluated = {"job": "one", "tag": "before", "step": 0, "sampled": 0.5}
    await events.append(state, "evaluation", evaluated)
    await recorded_mesh.until(lambda: hung.exists() and bool(hung.read_text()), "a hung tracker")
    leader = RegistryEntry("planner/0", "planner", incarnation="1")
    lease = await register(state, leader, ttl_ms=600_000)
    await jobs.set_phase(state, "one", jobs.Phase.FAILED, lease, "planner/0", error="enough")
    await recorded_mesh.until((one / "in_flight.json").exists, "the last look at a job")
    await recorded_mesh.note("other", "goes on")
    await recorded_mesh.await_note(other, "goes on")
    assert not (one / "summary.json").exists()
    os.kill(int(hung.read_text()), signal.SIGKILL)
    await recorded_mesh.until((one / "summary.json").exists, "the report")
    assert json.loads((one / "tracking.json").read_text())["wandb"]["dropped"] == 1
    await recorded_mesh.end()


async def test_record_is_copied_to_the_jobs_url(
    recorded_mesh: RecordedMesh, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.write_text("in the way")
    run_dir = await recorded_mesh.submit("one", JobConfig(out=f"file://{there}"))
    told: list[str] = []

    def poll() -> bool:
        told[:] = [e.kind for e in read_events(run_dir)]
        return "out_failed" in told

    await recorded_mesh.until(poll, "what is in the way")
    there.unlink()
    await recorded_mesh.note("one", "last")
    await recorded_mesh.await_note(run_dir, "last")
    await recorded_mesh.end()
    for name in ("summary.json", "events.jsonl", "report.html", "job.json", "in_flight.json"):
        assert (there / name).read_bytes() == (run_dir / name).read_bytes(), name


async def test_interrupted_recorder_stops_copying_and_names_the_remaining_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, run_dir, stop = Launcher(MeshPaths(tmp_path), MeshShape()), tmp_path / "one", Event()
    document = JobConfig(name="one", out=f"file://{tmp_path}/there").to_document()
    write_json(run_dir / "job.json", {"job": "one", "document": document})
    recorder = Recorder(launcher, "one", run_dir)
    summary = await report.write_results(recorder)
    assert await _conclude(recorder, summary, launcher, stop) == EXIT_INTERRUPTED
    output = capsys.readouterr().out
    assert (
        0
        <= output.index("To resume")
        < output.index(f"copying the remaining files to file://{tmp_path}/")
    )
    assert (tmp_path / "there/summary.json").is_file()
    recorder = Recorder(launcher, "one", run_dir)
    await recorder.abandon()
    assert "the copy has been closed" in await recorder.finish_copy(stop)


async def test_failed_model_export_is_reported_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, run_dir = Launcher(MeshPaths(tmp_path), MeshShape()), tmp_path / "one"
    run_dir.mkdir()
    assert not await report.export_model(launcher, run_dir)
    output = capsys.readouterr().err
    assert output.startswith("the model was not exported: ") and str(run_dir) in output
    assert not (run_dir / "model").exists()


class InterruptedState:
    """State that does not answer for some calls."""

    def __init__(self, state: Any) -> None:
        self._state, self.silent_calls = state, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._state, name)
        if not self.silent_calls or not callable(found):
            return found
        self.silent_calls -= 1
        raise StateUnavailable("Redis does not answer", where="a test", fix="Wait")


@pytest.mark.parametrize(("silent_calls", "is_counted"), [(0, True), (1, False)])
async def test_record_without_its_last_events_has_no_count(
    tmp_path: Path, silent_calls: int, is_counted: bool
) -> None:
    launcher = Launcher(MeshPaths(tmp_path), MeshShape())
    state = InterruptedState(open_simulated_state(launcher.clock))
    launcher.state = state  # type: ignore[assignment]
    run_dir, document = tmp_path / "a", replace(JobConfig(), name="a").to_document()
    write_json(run_dir / "job.json", {"job": "a", "document": document})
    await jobs.submit(launcher.state, "a", document, str(run_dir), "a")
    recorder = Recorder(launcher, "a", run_dir)
    assert await recorder.poll() is not None
    state.silent_calls = silent_calls
    await recorder.close()
    assert (run_dir / RECORD_END_FILE).exists() == is_counted
    await launcher.state.close()
