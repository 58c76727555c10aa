"""A `job.json` that is damaged or gone is written again from the run's own Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.common.base.errors import Damaged
from meshrl.common.job.config import JobConfig
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import State
from meshrl.directory.places import MeshPlace, read_json, write_json
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.shape import MeshShape
from meshrl.run.resuming import record_of

JOB = "sum"


def test_the_copy_in_redis_is_used_and_without_one_it_is_said_what_to_do(tmp_path: Path) -> None:
    document = JobConfig(name=JOB).document()
    path = tmp_path / "job.json"
    write_json(path, {"job": JOB, "document": document})
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(Damaged, match=r"has no copy of it.*copy of the run"):
        record_of(tmp_path)

    async def submit(state: State) -> None:
        await jobs.submit(state, JOB, document, str(tmp_path), "submit")

    asyncio.run(Launcher(MeshPlace(tmp_path), MeshShape()).ask_redis(submit))
    assert record_of(tmp_path) == {"job": JOB, "document": document}
    assert (tmp_path / "quarantine/job.json").read_bytes() == whole[:-9]
    assert read_json(path)["job"] == JOB
    path.unlink()
    assert record_of(tmp_path) == {"job": JOB, "document": document}
