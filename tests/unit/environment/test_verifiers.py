"""Environments of the `verifiers` package: their loop in its interpreter, turns as token ids."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ToolFailed
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import DatasetConfig, EnvironmentConfig, JobConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job import tasksets
from meshrl.services.rollout.environments.environment_pool import EnvironmentPool
from tests.load import scaled
from tests.meshes import alone
from tests.unit.common.model.chatting import qwen3_tokenizer

pytestmark = [pytest.mark.needs("verifiers"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
CALL = '<tool_call>\n{"name": "adding_add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


def create_job(tmp_path: Path) -> JobData:
    (tmp_path / "modules").mkdir()
    shutil.copyfile(ROOT / "tests/verifiers/doubts.py", tmp_path / "modules/doubts.py")
    qwen3_tokenizer(tmp_path)
    environment = EnvironmentConfig(
        verifiers="doubts",
        chat="qwen3",
        python=str(ROOT / ".venvs/verifiers/bin/python"),
        step_deadline_s=scaled(20.0),
    )
    return JobData("job", JobConfig(environment=environment), tmp_path, tmp_path)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[EnvironmentPool]:
    clock = SystemClock()
    mesh = alone("rollout/job/0", clock, Random(1), SystemHost())
    pool = EnvironmentPool(mesh, create_job(tmp_path), tmp_path)
    yield pool
    await pool.close()
    await mesh.leave()


class Trajectory:
    """Shard's side of an environment, over token ids alone."""

    def __init__(self, pool: EnvironmentPool, tokenizer: Tokenizer, key: int, row: Any) -> None:
        self.pool, self.tokenizer, self.key, self.row = pool, tokenizer, key, row
        self.ids: list[int] = []
        self.calls: list[Any] = []

    async def begin(self) -> str:
        self.ids = list(await self.pool.begin(self.key, self.row))
        return self.tokenizer.decode(self.ids)

    async def step(self, text: str | list[int]) -> tuple[str, Any]:
        """Return (append, its text) or (done, score)."""
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        before, calls = list(self.ids), list(self.calls)
        _, action, value = await self.pool.step(self.key, ids, lambda: [self.row, calls, before])
        self.calls.append(["step", ids])
        self.ids += ids
        if action == "append":
            self.ids += value
            return action, self.tokenizer.decode(value)
        return action, value

    async def cut(self, ids: list[int]) -> Any:
        replay = [self.row, self.calls, self.ids]
        return (await self.pool.end_early(self.key, ids, lambda: replay))[1]


def row(answer: int, mood: str = "patient") -> dict[str, Any]:
    return {"prompt": "how much?", "answer": answer, "mood": mood}


def trajectories(pool: EnvironmentPool, tmp_path: Path, rows: list[Any]) -> list[Trajectory]:
    tokenizer = Tokenizer.load(tmp_path)
    return [Trajectory(pool, tokenizer, key, r) for key, r in enumerate(rows, 1)]


async def test_rollout_of_the_package_becomes_a_trajectory(
    pool: EnvironmentPool, tmp_path: Path
) -> None:
    """Run tools, a second user turn, a rubric score, cuts and failures concurrently."""
    ts = trajectories(
        pool,
        tmp_path,
        [
            *(row(3, "doubtful"), row(4), row(3), row(3), row(1, "broken"), row(1, "forgetful")),
            row(1, "undecided") | {"timeout": {"scoring": 0.2}},
            row(1, "infinite"),
            row(1, "garbled"),
        ],
    )
    doubtful, wrong, cut_in_turn, cut_before, broken, forgetful = ts[:6]
    undecided, infinite, garbled = ts[6:]
    openings = await asyncio.gather(*(t.begin() for t in ts))
    assert '"name": "adding_add"' in openings[0]
    assert openings[0].endswith("user\nhow much?<|im_end|>\n<|im_start|>assistant\n")

    action, text = await doubtful.step("<think>\nhm\n</think>\n\n" + CALL)
    assert action == "append" and "<tool_response>\n3\n</tool_response>" in text
    action, text = await doubtful.step("3<|im_end|>")
    assert action == "append" and "user\nAre you sure?<|im_end|>" in text
    # A turn with "3" among ids that no text encodes to: half a character, markup, no end.
    half_character = doubtful.tokenizer.encode("é")[:1]
    unencodable_ids = [
        *doubtful.tokenizer.encode("<tool_response>3"),
        *half_character,
        *half_character,
    ]
    assert await doubtful.step(unencodable_ids) == ("done", 1.0)

    assert await wrong.step("3<|im_end|>") == ("done", 0.0)
    assert await cut_in_turn.cut(cut_in_turn.tokenizer.encode("it is 3")) == 1.0
    await cut_before.step(CALL)
    assert await cut_before.cut([]) == 0.0
    with pytest.raises(ToolFailed, match="no idea what is right"):
        await broken.step("1<|im_end|>")
    with pytest.raises(ToolFailed, match="does not begin with the conversation"):
        await forgetful.step("1<|im_end|>")
    with pytest.raises(ToolFailed, match="timed out"):
        await undecided.step("1<|im_end|>")
    with pytest.raises(ToolFailed, match=r"half a pair: \?"):
        await garbled.step("1<|im_end|>")
    with pytest.raises(ToolFailed, match="must be finite"):
        await infinite.step("1<|im_end|>")


async def test_slow_environment_does_not_block_others(
    pool: EnvironmentPool, tmp_path: Path
) -> None:
    slow, quick = trajectories(pool, tmp_path, [row(3, f"slow {scaled(1.5)}"), row(3)])
    await quick.begin()  # the process is running
    opening = asyncio.create_task(slow.begin())
    assert await quick.step("3<|im_end|>") == ("done", 1.0)
    assert not opening.done()
    await opening


async def test_killed_process_is_restored_from_logged_turns(
    pool: EnvironmentPool, tmp_path: Path
) -> None:
    one, two = trajectories(pool, tmp_path, [row(3, "doubtful"), row(3)])
    await asyncio.gather(one.begin(), two.begin())
    await one.step(CALL)
    (pid,) = pool.pids.values()
    os.kill(pid, signal.SIGKILL)
    (_, text), (_, score) = await asyncio.gather(one.step("3<|im_end|>"), two.step("3<|im_end|>"))
    assert "Are you sure?" in text and score == 1.0
    assert await one.step("3<|im_end|>") == ("done", 1.0)
    one.row = row(3)  # its next question differs from the logged one
    one.key = 9
    with pytest.raises(ToolFailed, match=r"is not reproducible|did not request"):
        await one.step("3<|im_end|>")


def test_tasks_of_a_taskset_become_rows(tmp_path: Path) -> None:
    job = create_job(tmp_path)
    config = JobConfig(
        environment=job.config.environment, dataset=DatasetConfig(tasks=4, held_out_tasks=2)
    )
    held_out, train = tasksets.load_tasks(config, job.modules_dir)
    assert len(held_out) == 2 and len(train) == 4
    assert '"prompt": "0+0?"' in held_out[0] and '"answer": 4' in train[0]
