"""Environment processes: killed and stopped ones cost no trajectory; code that hangs fails."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtests.chat_templates.comparing import directory_of
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ToolFailed
from meshrl.common.base.host.settings import REDIS_ENV, SECRET_BYTES, SETTINGS_ENV, MeshSettings
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import EnvironmentConfig, JobConfig, RolloutConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.environment.environments import build_environments, build_parser
from meshrl.services.rollout.environments.environment_pool import EnvironmentPool, build_command
from meshrl.services.rollout.trajectories.failures import TrajectoryFailed
from tests.load import scaled
from tests.meshes import alone
from tests.unit.common.model.templates.formats import FORMATS

ROOT = Path(__file__).parents[4]
TOKENIZER = Tokenizer.load(str(ROOT / "examples/calculator/tokenizer.json"))
DEADLINE_S = 1.0
MODULE = """\
import time

class Counting:
    def open(self, row):
        self.seen = 0
        self.mark = row.get("mark")
        return "?1+1="

    def step(self, text):
        self.seen += 1
        if "9" in text:
            time.sleep(3600)
        if "5" in text:
            time.sleep(LONG_S)
        return {"append": str(self.seen)}

    def close(self):
        if self.mark:
            open(self.mark, "w").write(str(self.seen))
"""


@asynccontextmanager
async def create_pool(
    directory: Path, module: str, environment: EnvironmentConfig
) -> AsyncIterator[EnvironmentPool]:
    """Create a pool of environments whose class is in the code of a module."""
    (directory / "modules").mkdir()
    (directory / f"modules/{environment.use.partition(':')[0]}.py").write_text(module)
    shutil.copyfile(ROOT / "examples/calculator/tokenizer.json", directory / "tokenizer.json")
    job = JobData("job", JobConfig(environment=environment), directory, directory)
    mesh = alone("rollout/job/0", SystemClock(), Random(1), SystemHost())
    pool = EnvironmentPool(mesh, job, directory)
    yield pool
    await pool.close()
    await mesh.leave()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[EnvironmentPool]:
    deadline_s = scaled(
        DEADLINE_S
    )  # A deadline that a healthy process meets on a slow machine, too.
    module = f"LONG_S = {0.4 * deadline_s}\n{MODULE}"
    about = EnvironmentConfig(use="counting:Counting", step_deadline_s=deadline_s)
    async with create_pool(tmp_path, module, about) as made:
        yield made


async def assert_stopped_process_is_reported(pool: EnvironmentPool) -> None:
    """Stop an idle process and continue it."""
    [(name, pid)] = pool.pids.items()
    for number, expected in ((signal.SIGSTOP, [name]), (signal.SIGCONT, list[str]())):
        os.kill(pid, number)
        async with asyncio.timeout(scaled(20.0)):
            while list(pool.list_stopped()) != expected:
                await asyncio.sleep(0.01)
        assert pool.list_stopped() == pool.list_stopped(), "since when does not change"


async def encode_digit(pool: EnvironmentPool, digit: int) -> list[int]:
    """Return the token of a digit once the process is running."""
    await pool.begin(1 << 20, {})
    return TOKENIZER.encode(str(digit))


async def test_killed_process_is_replaced_and_environments_are_rebuilt(
    pool: EnvironmentPool,
) -> None:
    two = await encode_digit(pool, 2)
    assert (await pool.step(1, two, lambda: [{}, []]))[1] == "append"
    await assert_stopped_process_is_reported(pool)
    for _ in range(3):
        (pid,) = pool.pids.values()
        os.kill(pid, signal.SIGKILL)
        text, action, reply = await pool.step(1, two, lambda: [{}, [["step", two]]])
        assert (text, action) == ("2", "append")
        assert reply == two, "the second step of an environment that was told of the first"


async def test_environment_process_gets_no_secrets_of_its_shard(
    pool: EnvironmentPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "5e" * SECRET_BYTES
    settings = tmp_path / "settings.json"
    MeshSettings("redis://:hush@localhost", str(tmp_path), secret=secret).to_file(settings)
    monkeypatch.setenv(SETTINGS_ENV, str(settings))
    monkeypatch.setenv(REDIS_ENV, "redis://:hush@localhost")
    monkeypatch.setenv("MESHRL_MESH", "5e1f")
    await encode_digit(pool, 2)
    (pid,) = pool.pids.values()
    process = psutil.Process(pid)
    variables = process.environ()
    assert variables.get(SETTINGS_ENV, "") == variables.get(REDIS_ENV, "") == ""
    for value in [*variables.values(), *process.cmdline()]:
        assert "hush" not in value and secret not in value and str(settings) not in value
    assert process.net_connections("inet") == []
    assert variables["MESHRL_MESH"] == "5e1f", "its mesh finds it all the same"


async def test_stopped_process_loses_no_trajectory(pool: EnvironmentPool) -> None:
    two = await encode_digit(pool, 2)
    for _ in range(3):
        (pid,) = pool.pids.values()
        os.kill(pid, signal.SIGSTOP)
        _, action, _ = await pool.step(1, two, lambda: [{}, []])
        assert action == "append"


async def test_hanging_code_fails_by_type_and_leaves_others_running(pool: EnvironmentPool) -> None:
    two, nine = await encode_digit(pool, 2), await encode_digit(pool, 9)
    keys = range(1, 5)
    for key in keys:
        await pool.begin(key, {})
    answers = await asyncio.gather(
        *(pool.step(key, nine if key == 3 else two, lambda: [{}, []]) for key in keys),
        return_exceptions=True,
    )
    failed = {key: a for key, a in zip(keys, answers, strict=True) if isinstance(a, Exception)}
    assert failed.keys() == {3}
    assert isinstance(failed[3], TrajectoryFailed) and "hung: step()" in str(failed[3])
    assert failed[3].kind == "environment timed out"


async def test_restore_deadline_covers_the_repeated_steps(pool: EnvironmentPool) -> None:
    five, two = await encode_digit(pool, 5), await encode_digit(pool, 2)
    (pid,) = pool.pids.values()
    os.kill(pid, signal.SIGKILL)
    await pool.begin(2, {})  # started again: the longer deadline of a start is over
    pids = pool.pids
    answer = await pool.step(
        1, two, lambda: [{}, [["step", five]] * 4]
    )  # 1.6 deadlines, a step 0.4
    assert answer == ("2", "append", five) and pool.pids == pids


async def test_unserializable_value_fails_alone_and_keeps_the_process(
    pool: EnvironmentPool,
) -> None:
    two = await encode_digit(pool, 2)
    pids = pool.pids
    keys = range(1, 5)
    await asyncio.gather(*(pool.begin(key, {}) for key in keys))
    bad: dict[int, dict[str, Any]] = {
        2: {"n": 1 << 64},
        3: {"text": "\ud800"},
        4: {"text": "x" * (64 << 20)},
    }
    answers = await asyncio.gather(
        pool.step(1, two, lambda: [{}, []]),
        *(pool.begin(key, row) for key, row in bad.items()),
        return_exceptions=True,
    )
    assert answers[0] == ("2", "append", TOKENIZER.encode("1"))
    for answer, says in zip(answers[1:], ("OverflowError", "surrogates", "limit"), strict=True):
        assert isinstance(answer, ToolFailed) and says in str(answer)
    assert pool.pids == pids


async def test_pool_close_closes_environments(pool: EnvironmentPool, tmp_path: Path) -> None:
    two = await encode_digit(pool, 2)
    mark = tmp_path / "mark"
    await pool.begin(1, {"mark": str(mark)})
    await pool.step(1, two, lambda: [{}, []])
    await pool.close()
    assert mark.read_text() == "1"


def test_environment_process_uses_the_jobs_chat_template(tmp_path: Path) -> None:
    directory_of(FORMATS["qwen3"], tmp_path)
    environment = EnvironmentConfig(chat="template", chat_options={"enable_thinking": False})
    config = JobConfig(environment=environment, rollout=RolloutConfig(stop=["</s>", "<|im_end|>"]))
    argv = build_command(JobData("job", config, tmp_path, tmp_path))
    served = build_environments(build_parser().parse_args(argv[3:]))
    status, ids = served.run_operation(1, "begin", {"prompt": "hello"})
    tokenizer = Tokenizer.load(tmp_path)
    assert status == "ok"
    assert tokenizer.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert served.run_operation(1, "step", tokenizer.encode("so</s>"))[1] == [
        "so</s>",
        "done",
        None,
    ]


# A turn of "1" is over when another trajectory's "2" has come.
WAITING = """\
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
async def threads(tmp_path: Path) -> AsyncIterator[EnvironmentPool]:
    """Create a pool whose process has two threads."""
    about = EnvironmentConfig(use="waiting:Waiting", step_deadline_s=scaled(60.0), threads=2)
    async with create_pool(tmp_path, WAITING, about) as made:
        yield made


async def test_trajectory_continues_while_another_waits_for_it(threads: EnvironmentPool) -> None:
    for key in (1, 2):
        await threads.begin(key, {})
    waits = asyncio.ensure_future(threads.step(1, TOKENIZER.encode("1"), lambda: [{}, []]))
    assert await threads.step(2, TOKENIZER.encode("2"), lambda: [{}, []]) == ("2", "done", 1.0)
    assert await waits == ("1", "done", 1.0)


async def test_killed_threaded_process_is_replaced(
    threads: EnvironmentPool,
) -> None:
    await threads.begin(1, {})
    two = TOKENIZER.encode("2")
    assert (await threads.step(1, two, lambda: [{}, []]))[2] == 1.0
    await assert_stopped_process_is_reported(threads)
    (pid,) = threads.pids.values()
    os.kill(pid, signal.SIGKILL)
    again = await threads.step(1, two, lambda: [{}, [["step", two]]])
    assert again == ("2", "done", 2.0), "the second turn of one that was told of the first"
