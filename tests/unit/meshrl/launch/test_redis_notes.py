"""What a power cut leaves of the launcher's notes beside Redis, and where a job goes on by what is
left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Damaged
from meshrl.common.base.files.sealed import sealed
from meshrl.common.base.random import Random
from meshrl.common.records.checkpoints import checkpoint_name
from meshrl.common.state import events, jobs
from meshrl.common.state.redis.client import State
from meshrl.common.state.server.rollback import JobMark, RollbackMark
from meshrl.common.state.steps import IDS_APART
from meshrl.directory.places import MeshPlace
from meshrl.launch.head.restoring import put_back
from meshrl.launch.redis import note as notes
from meshrl.launch.redis.note import Note
from meshrl.launch.redis.progress import RedisProgress
from meshrl.sim.disk import Disk
from meshrl.sim.redis.state import simulated_as, simulated_state
from tests.contract.state.state_bench import JOB, document


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "mesh"
    made.mkdir()
    return made


@pytest.fixture
def disk(root: Path) -> Iterator[Disk]:
    made = Disk(root)
    made.watch()
    yield made
    made.close()


def note_of(**one: int | str) -> Note:
    return Note(RollbackMark("1-0", 7, {JOB: JobMark(**one)}))  # type: ignore[arg-type]


class Busy(State):
    """A Redis in which an event comes, and becomes known, while it is being looked at."""

    progress: RedisProgress | None = None

    async def run(self, script: str, keys: list[str], *args: Any) -> Any:
        """Answer a script; before `job_marks`, which ends a look, another event comes."""
        if script == "job_marks" and self.progress is not None:
            await events.append(self, "note", {})
            self.progress.known = RollbackMark(await events.last_id(self))
        return await super().run(script, keys, *args)


async def test_an_event_that_comes_during_a_look_does_not_make_redis_look_older(root: Path) -> None:
    progress = RedisProgress(MeshPlace(root))
    state = simulated_as(Busy, SystemClock())
    assert isinstance(state, Busy)
    await events.append(state, "note", {})
    progress.known = RollbackMark(await events.last_id(state))
    state.progress = progress
    for records in (True, False):
        found, why = await progress.look_back(state, records)
        assert why == "" and found.event != progress.known.event
    await state.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_note_outlives_a_power_cut(root: Path, disk: Disk, seed: int) -> None:
    path = root / "note.json"
    for told in (note_of(lineage=1, version=3), note_of(lineage=1, version=4)):
        notes.write(path, told)
        disk.cut(Random(seed))
        assert notes.read(path) == told


def test_a_damaged_note_is_told_and_tells_nothing(root: Path) -> None:
    path, damaged = root / "note.json", list[Path]()
    notes.write(path, note_of(lineage=1, version=3))
    path.write_bytes(path.read_bytes().replace(b"version", b"versipn"))
    assert notes.read(path, lambda at, _: damaged.append(at)) == Note() and damaged == [path]
    with pytest.raises(Damaged):
        notes.read(path)


async def put_back_lineage(run_dir: Path, seen: JobMark) -> tuple[int, int]:
    """The lineage in which a job goes on, and the number of its next group."""
    state = simulated_state(SystemClock())
    assert await put_back(state, run_dir, JOB, document(), seen) is None
    row = await jobs.job(state, JOB)
    next_group = await state.command("HGET", f"{{{JOB}}}:job", "next_group")
    return row.lineage, int(next_group)


async def test_the_checkpoint_before_the_first_step_is_enough_for_a_lineage_of_its_own(
    tmp_path: Path,
) -> None:
    """All that told of groups went with a power cut; they may have been opened all the same."""
    assert await put_back_lineage(tmp_path, JobMark()) == (0, 0), "nobody has begun"
    assert await put_back_lineage(tmp_path, JobMark(0, 0)) == (1, IDS_APART)
    assert await put_back_lineage(tmp_path, JobMark(1, 0)) == (2, 2 * IDS_APART)
    (tmp_path / "checkpoints").mkdir()
    held = {"lineage": 0, "step": 0, "weights": "ab" * 16}
    name = checkpoint_name(0, 0, "ab" * 16)
    (tmp_path / "checkpoints" / f"{name}.json").write_bytes(sealed(held))
    assert await put_back_lineage(tmp_path, JobMark()) == (1, IDS_APART)
    assert await put_back_lineage(tmp_path, JobMark(2, -1)) == (3, 3 * IDS_APART)
