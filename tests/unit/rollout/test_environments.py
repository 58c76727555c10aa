"""Environment processes: one that is killed or stopped costs nothing, code that hangs fails."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.config import EnvironmentConfig, JobConfig
from common.errors import ToolFailed
from common.host import SystemHost
from common.jobdata import JobData
from common.mesh import Mesh
from common.random import Random
from common.state.client import State
from common.transport.memory import MemoryNetwork, MemoryTransport
from services.rollout.environments import EnvironmentPool

ROOT = Path(__file__).parents[3]
DEADLINE_S = 1.0
MODULE = """\
import time

class Counting:
    def open(self, row):
        self.seen = 0
        return "?1+1="

    def step(self, text):
        self.seen += 1
        if "9" in text:
            time.sleep(60)
        return {"append": str(self.seen)}

    def close(self):
        pass
"""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[EnvironmentPool]:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/counting.py").write_text(MODULE)
    shutil.copyfile(ROOT / "examples/calculator/tokenizer.json", tmp_path / "tokenizer.json")
    environment = EnvironmentConfig(use="counting:Counting", step_deadline_s=DEADLINE_S)
    job = JobData("job", JobConfig(environment=environment), tmp_path, tmp_path)
    clock = SystemClock()
    mesh = Mesh(
        name="rollout/0",
        kind="rollout",
        state=State.simulated(clock),
        transport=MemoryTransport(MemoryNetwork(clock, Random(1)), "mem://rollout"),
        clock=clock,
        random=Random(1),
        host=SystemHost(),
    )
    pool = EnvironmentPool(mesh, job, tmp_path)
    yield pool
    await pool.close()
    await mesh.leave()


async def encoded(pool: EnvironmentPool, digit: int) -> list[int]:
    """The token of a digit: the prompt is "?1+1=", and the vocabulary is in order of characters."""
    one = (await pool.begin(1 << 20, {}))[1]
    assert await pool.text(1 << 20, [one + digit - 1]) == str(digit)
    return [one + digit - 1]


async def test_a_killed_process_is_replaced_and_its_environments_are_rebuilt(
    pool: EnvironmentPool,
) -> None:
    two = await encoded(pool, 2)
    assert (await pool.step(1, two, lambda: [{}, []]))[1] == "append"
    for _ in range(3):
        (pid,) = pool.pids.values()
        os.kill(pid, signal.SIGKILL)
        text, action, said = await pool.step(1, two, lambda: [{}, [["step", two]]])
        assert (text, action) == ("2", "append")
        assert said == two, "the second step of an environment that was told of the first"


async def test_a_stopped_process_costs_no_trajectory(pool: EnvironmentPool) -> None:
    two = await encoded(pool, 2)
    for _ in range(3):
        (pid,) = pool.pids.values()
        os.kill(pid, signal.SIGSTOP)
        _, action, _ = await pool.step(1, two, lambda: [{}, []])
        assert action == "append"


async def test_code_that_hangs_fails_by_type_and_takes_no_neighbour_with_it(
    pool: EnvironmentPool,
) -> None:
    two, nine = await encoded(pool, 2), await encoded(pool, 9)
    keys = range(1, 5)
    for key in keys:
        await pool.begin(key, {})
    answers = await asyncio.gather(
        *(pool.step(key, nine if key == 3 else two, lambda: [{}, []]) for key in keys),
        return_exceptions=True,
    )
    failed = {key: a for key, a in zip(keys, answers, strict=True) if isinstance(a, Exception)}
    assert failed.keys() == {3}
    assert isinstance(failed[3], ToolFailed) and "hung: step()" in str(failed[3])
