"""Keeps the records of all jobs of a mesh that stays up, each by a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import DeadlineExceeded, MeshError, StateUnavailable
from common.state import events, jobs
from common.state.accounting import wrong
from meshrl.launch.launcher import Launcher
from meshrl.observe import report
from meshrl.observe.audit import accused
from meshrl.observe.recorder import ANSWER_S, LOOK_S, Recorder

RETRY_S = 5.0  # a run directory that cannot be read or written is tried again: disks get emptied


async def record_all(launcher: Launcher, stop: asyncio.Event) -> None:
    """Records every job of a mesh until `stop`, each by itself, so that one with a bad directory or
    a slow tracker holds up no other.
    """
    recording: dict[str, asyncio.Task[None]] = {}
    while not stop.is_set():
        try:
            async with launcher.clock.timeout(ANSWER_S, "a look at the jobs"):
                known = await jobs.jobs(launcher.state)
        except (StateUnavailable, DeadlineExceeded):
            known = []
        for row in known:
            if not row.ended and row.id not in recording:
                work = record(launcher, row.id, Path(row.run_dir), stop)
                recording[row.id] = asyncio.create_task(work, name=f"record {row.id}")
        for job in [job for job, task in recording.items() if task.done()]:
            recording.pop(job).result()  # raises what is a fault of ours; it may be resumed
        await launcher.clock.sleep(LOOK_S)
    await asyncio.gather(*recording.values())


async def record(launcher: Launcher, job: str, run_dir: Path, stop: asyncio.Event) -> None:
    """Records one job until it is over or `stop`, and writes its report.

    While its directory cannot be used it says so once, in the log and as the event `unrecorded`,
    and tries again.
    """
    said = ""
    while True:
        recorder: Recorder | None = None
        try:
            recorder = Recorder(launcher, job, run_dir)
            async with contextlib.aclosing(report.LivePage(recorder, _say_of(job))) as page:
                while not stop.is_set():
                    shot = await recorder.look()
                    said = ""
                    if shot is not None and shot.over:
                        break
                    page.look()
                    await launcher.clock.sleep(LOOK_S)
            await recorder.close()
            summary = await report.write(recorder)
            if bad := wrong(summary):
                _say_of(job)(accused(run_dir, bad))
            return
        except (OSError, MeshError) as error:
            if str(error) != said:
                said = str(error)
                await _unrecorded(launcher, job, said)
            if recorder is not None:
                await recorder.abandon()
        with contextlib.suppress(DeadlineExceeded):
            async with launcher.clock.timeout(RETRY_S, "the next try"):
                await stop.wait()
                return


def _say_of(job: str) -> Callable[[str], None]:
    """Says something of a job in the mesh's log."""
    return lambda text: print(f"{job}: {text}", file=sys.stderr, flush=True)


async def _unrecorded(launcher: Launcher, job: str, why: str) -> None:
    print(f"{job} is not recorded: {why}", file=sys.stderr, flush=True)
    with contextlib.suppress(StateUnavailable, DeadlineExceeded):
        async with launcher.clock.timeout(ANSWER_S, "a note in the event stream"):
            await events.append(launcher.state, "unrecorded", {"job": job, "why": why})
