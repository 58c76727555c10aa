"""An environment process with threads: who waits in it holds up no other, and what is lost with it
is rebuilt.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import EnvironmentConfig, JobConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.rollout.environments.pool import EnvironmentPool
from tests.load import scaled
from tests.meshes import alone
from tests.unit.rollout.environments.test_pool import reports_a_stopped_process

ROOT = Path(__file__).parents[4]
TOKENIZER = Tokenizer.load(str(ROOT / "examples/calculator/tokenizer.json"))
# A turn of "1" is over when another trajectory's "2" has come.
MODULE = """\
import threading

came = threading.Event()

class Waiting:
    def open(self, row):
        self.turns = 0
        return "?1+1="

    def step(self, text):
        self.turns += 1
        if text == "2":
            came.set()
        if text == "1" and not came.wait(3600):
            raise TimeoutError("nobody came")
        return {"done": True, "reward": self.turns}

    def close(self):
        return None
"""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[EnvironmentPool]:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/waiting.py").write_text(MODULE)
    shutil.copyfile(ROOT / "examples/calculator/tokenizer.json", tmp_path / "tokenizer.json")
    environment = EnvironmentConfig(use="waiting:Waiting", step_deadline_s=scaled(60.0), threads=2)
    job = JobData("job", JobConfig(environment=environment), tmp_path, tmp_path)
    mesh = alone("rollout/job/0", SystemClock(), Random(1), SystemHost())
    pool = EnvironmentPool(mesh, job, tmp_path)
    yield pool
    await pool.close()
    await mesh.leave()


async def test_a_trajectory_goes_on_while_another_waits_for_it(pool: EnvironmentPool) -> None:
    for key in (1, 2):
        await pool.begin(key, {})
    waits = asyncio.ensure_future(pool.step(1, TOKENIZER.encode("1"), lambda: [{}, []]))
    assert await pool.step(2, TOKENIZER.encode("2"), lambda: [{}, []]) == ("2", "done", 1.0)
    assert await waits == ("1", "done", 1.0)


async def test_a_killed_process_is_replaced_and_its_environments_are_rebuilt(
    pool: EnvironmentPool,
) -> None:
    await pool.begin(1, {})
    two = TOKENIZER.encode("2")
    assert (await pool.step(1, two, lambda: [{}, []]))[2] == 1.0
    await reports_a_stopped_process(pool)
    (pid,) = pool.pids.values()
    os.kill(pid, signal.SIGKILL)
    again = await pool.step(1, two, lambda: [{}, [["step", two]]])
    assert again == ("2", "done", 2.0), "the second turn of one that was told of the first"
