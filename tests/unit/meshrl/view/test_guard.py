"""Faults of views, reports and trackers, which cause a warning but never end or fail a run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.job.config import JobConfig
from meshrl.common.state import jobs
from meshrl.common.state.events import Event
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.runs import session
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.view.guard import WarningGuard
from meshrl.view.live.run_view import GuardedView, RunLines
from meshrl.view.recording.recorder import Recorder
from meshrl.view.report import report
from tests.load import scaled


async def test_failing_report_and_trackers_cause_warnings_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, run_dir = Launcher(MeshPaths(tmp_path), MeshShape()), tmp_path / "one"
    document = JobConfig(name="one").to_document()
    tracking = {"tensorboard": True, "trace": True}
    held = {"job": "one", "document": document | {"tracking": tracking}}
    later: dict[str, Any] = {"tensorboard": {"id": "one", "of_a_later_version": 1}}
    write_json(run_dir / "job.json", held)
    write_json(run_dir / "tracking.json", later)
    for name in ("report.html", "samples.jsonl", "trace"):
        (run_dir / name / "in the way").mkdir(parents=True)
    assert Recorder(launcher, "one", run_dir).trackers.trackers == []
    (run_dir / "tracking.json").unlink()
    recorder = Recorder(launcher, "one", run_dir)
    recorder.usage.prefixes["1"] = {"of_a_later_version": None}  # type: ignore[dict-item]
    recorder.trackers.enqueue([], [Event("1-0", 1, "evaluation", {"tag": "before", "step": 0})])
    await report.write_results(recorder)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["job"], summary["phase"], summary["lost"]) == ("one", "queued", 0)
    output = capsys.readouterr().err
    for what in ("tracking by tensorboard", "tracking", "the rest of the summary", "the report"):
        assert f"warning: {what} failed: " in output, output


def test_guarded_fault_is_one_warning_with_its_location() -> None:
    said: list[str] = []
    guard = WarningGuard(said.append)
    for _ in range(3):
        with guard("the chart"):
            [].pop()
    [warning] = said
    assert warning.startswith("warning: the chart failed: IndexError: pop from empty list (test_")


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("Broken pipe")


def test_view_with_a_closed_output_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.redirect_stdout(ClosedPipe()), GuardedView(RunLines()) as view:
        view.print_line("one")
        view.print_line("two")
    assert capsys.readouterr().err.count("BrokenPipeError") == 1


PATIENCE_S = 40.0


class FollowedRun:
    """Run on a mesh without processes that a test follows from a chosen moment."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "one"
        self.page = self.run_dir / "report.html"
        self.launcher = Launcher(MeshPaths(directory), MeshShape())
        self.launcher.state = open_simulated_state(self.launcher.clock)
        self.stop = asyncio.Event()

    async def begin(self) -> None:
        document = JobConfig(name="one").to_document()
        write_json(self.run_dir / "job.json", {"job": "one", "document": document})
        await jobs.submit(self.launcher.state, "one", document, str(self.run_dir), "one")
        self.recorder = Recorder(self.launcher, "one", self.run_dir)
        await self.recorder.poll()

    def follow(self) -> None:
        following = session._follow_run(self.recorder, self.launcher, self.stop, RunLines())
        self.following = asyncio.create_task(following)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(scaled(PATIENCE_S)):
            while not condition():
                assert not self.following.done(), self.following.exception()
                await asyncio.sleep(0.01)

    async def await_next_poll(self) -> None:
        last = self.recorder.snapshot
        await self.until(lambda: self.recorder.snapshot is not last)

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(scaled(PATIENCE_S)):
            await self.following


@pytest.fixture
async def followed_run(tmp_path: Path) -> AsyncIterator[FollowedRun]:
    made = FollowedRun(tmp_path)
    await made.begin()
    yield made
    await made.launcher.state.close()


async def test_page_error_is_reported_once_and_the_page_is_retried(
    followed_run: FollowedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PAGE_INTERVAL_S", 0.1)
    samples = followed_run.run_dir / "samples.jsonl"
    samples.mkdir()
    followed_run.follow()
    said = ""

    def is_reported() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "report could not be written" in said

    await followed_run.until(is_reported)
    for _ in range(3):
        await followed_run.await_next_poll()  # which retries
    followed_run.page.mkdir()  # before a poll succeeds
    samples.rmdir()
    await followed_run.until(lambda: is_reported() and "report.html" in said)
    followed_run.page.rmdir()
    await followed_run.until(followed_run.page.is_file)
    await followed_run.end()
    is_reported()
    assert said.count("report could not be written") == 2, said


async def test_hanging_page_blocks_nothing_and_is_not_written_later(
    followed_run: FollowedRun,
) -> None:
    samples = followed_run.run_dir / "samples.jsonl"
    os.mkfifo(samples)  # a reader waits until another process writes
    followed_run.follow()
    opened: list[int] = []

    def reader() -> bool:
        try:
            opened.append(os.open(samples, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    await followed_run.until(reader)
    try:
        await followed_run.end()
        followed_run.page.write_text("of who comes after")
    finally:
        os.close(opened[0])
    await asyncio.get_running_loop().shutdown_default_executor()
    assert followed_run.page.read_text() == "of who comes after"
