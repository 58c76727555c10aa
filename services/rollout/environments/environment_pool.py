"""Pool of environment processes of a rollout shard, and recovery of trajectories when one exits."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.rollout.environments.environment_process import (
    EnvironmentHung,
    EnvironmentLost,
    EnvironmentProcess,
)
from meshrl.services.rollout.environments.episode_process import EpisodeProcess
from meshrl.services.rollout.trajectories.failures import FailureReporter, TrajectoryFailed

BOOT_SCRIPT = Path(__file__).parents[2] / "environment" / "verifiers_environment" / "boot.py"
MAX_HANGS = 2  # limit of an operation's hangs alone in a process that no signal stopped
TIMED_OUT = "environment timed out"
MAX_LOSSES = 5  # limit of processes lost in a row by an operation: a user may have killed some


def build_command(job: JobData) -> list[str]:
    config = job.config.environment
    places = ["--modules", str(job.modules_dir), "--tokenizer", str(job.tokenizer_file)]
    if config.verifiers:  # in the interpreter of that package
        argv = [config.python, "-I", str(BOOT_SCRIPT), "--taskset", config.verifiers, *places]
        argv += ["--options", json.dumps(config.verifiers_options)]
        return [*argv, *build_chat_arguments(job)]
    argv = [sys.executable, "-m", "meshrl.services.environment", "--use", config.use, *places]
    argv += ["--prompt", job.config.dataset.prompt, "--threads", str(config.threads)]
    argv += [f"--system={job.config.dataset.system}"]
    argv += ["--special-tokens", config.special_tokens]
    argv += ["--ends", json.dumps(job.config.rollout.stop)]
    if config.chat:
        argv += build_chat_arguments(job)
        argv += ["--tools", json.dumps(config.tools), "--mcp", json.dumps(config.mcp)]
    return argv


def build_chat_arguments(job: JobData) -> list[str]:
    """Build the arguments that describe the job's chat format to an environment process."""
    config = job.config.environment
    template = {
        "history": config.chat_history,
        "tool_call_parser": config.tool_call_parser,
        "stop_tokens": job.config.rollout.stop,
        "date": config.chat_date,
        "special_tokens": config.special_tokens,
    }
    argv = ["--chat", config.chat, "--chat-options", json.dumps(config.chat_options)]
    return [*argv, "--chat-template", json.dumps(template)]


class EnvironmentPool:
    """Pool of environments by trajectory, each in the process that its id maps to.

    A lost process is started again at its next operation. Each of its trajectories is rebuilt from
    `replay` before its operation is repeated. An operation that was pending when a process hung is
    repeated alone, so only an operation that repeatedly hangs alone fails.
    """

    def __init__(
        self, mesh: Mesh, job: JobData, logs: Path, failures: FailureReporter | None = None
    ) -> None:
        config = job.config.environment
        self._failures = failures or FailureReporter(mesh, job.id)
        self._dataset = job.config.dataset
        self._environment_name, self._deadline_s = (
            config.use or config.verifiers,
            config.step_deadline_s,
        )
        self._wall_clock, self._stopped_since_ms = mesh.clock.wall, dict[str, int]()
        at_once = config.verifiers or config.threads > 1
        kind = EpisodeProcess if at_once else EnvironmentProcess
        prefix = "environment-" + mesh.name.replace("/", "-")
        self._processes = [
            kind(
                mesh, build_command(job), name, logs / f"{name}.log", config.step_deadline_s, job.id
            )
            for name in (f"{prefix}-{i}" for i in range(config.processes))
        ]

    @property
    def pids(self) -> dict[str, int]:
        return {p.name: p.pid for p in self._processes}

    def list_stopped(self) -> dict[str, int]:
        """Return the processes stopped by a signal, with the wall-clock time in ms of the first
        detection. They have no lease that expires, and possibly no pending operation.
        """
        now_ms = int(self._wall_clock() * 1000)
        names = [process.name for process in self._processes if process.is_stopped]
        self._stopped_since_ms = {name: self._stopped_since_ms.get(name, now_ms) for name in names}
        return self._stopped_since_ms

    async def begin(self, key: int, row: dict[str, Any]) -> list[int]:
        """Open an environment; return the token ids of the prompt."""
        ids: list[int] = await self._perform(key, "begin", row, None)
        return ids

    async def encode_answer(self, key: int, row: dict[str, Any]) -> list[tuple[list[int], Any]]:
        """Return a supervised row as pieces: its prompt first, then learned and other ids.

        With learned ids comes their text, and None with the others.
        """
        argument = [row, self._dataset.response, self._dataset.train_on]
        pieces = await self._perform(key, "answer", argument, None)
        return [(ids, text) for ids, text in pieces]

    async def step(
        self, key: int, ids: list[int], replay: Callable[[], Any]
    ) -> tuple[str, str, Any]:
        """Run a step: return the turn's text, the action (tool, append or done), and its value.

        The value is the name and input of a tool, the appended ids, or a score (a number, or with
        metrics as in `reward_numbers`) or None.
        """
        text, action, value = await self._perform(key, "step", ids, replay)
        return text, action, value

    async def send_tool_result(
        self, key: int, value: Any, replay: Callable[[], Any]
    ) -> tuple[str, Any]:
        action, argument = await self._perform(key, "result", value, replay)
        return action, argument

    async def end_early(
        self, key: int, ids: list[int], replay: Callable[[], Any]
    ) -> tuple[str, Any]:
        """End the trajectory, within a turn or before one. Return the text of `ids`, its unfinished
        turn, and the environment's score, if any.
        """
        text, score = await self._perform(key, "cut", ids, replay)
        return text, score

    def close_environment(self, key: int) -> None:
        self._choose_process(key).submit((key, "close", None)).add_done_callback(
            lambda future: future.cancelled() or future.exception()
        )

    def _choose_process(self, key: int) -> EnvironmentProcess | EpisodeProcess:
        return self._processes[(key ^ key >> 12) % len(self._processes)]

    async def _perform(
        self, key: int, operation: str, argument: Any, replay: Callable[[], Any] | None
    ) -> Any:
        process = self._choose_process(key)
        hangs = losses = 0
        while True:
            try:
                # This operation may have caused the hang: repeat it without others.
                alone = losses > 1
                if losses and replay is not None:
                    await process.submit((key, "restore", replay()), unbatched=alone)
                answer = await process.submit((key, operation, argument), unbatched=alone)
                self._failures.clear_timeouts(TIMED_OUT)
                return answer
            except EnvironmentLost as error:
                if error.overdue_operations:  # counted once for all operations lost with it
                    text = (
                        f"the environment {self._environment_name} hung: {error.overdue_operations}"
                    )
                    error.overdue_operations, setting = "", "environment.step_deadline_s"
                    self._failures.count_timeout(
                        TIMED_OUT, TIMED_OUT, text, self._deadline_s, setting
                    )
                losses += 1
                hangs += isinstance(error, EnvironmentHung)
                if hangs == MAX_HANGS:
                    raise TrajectoryFailed(
                        f"the environment {self._environment_name} hung: {error}",
                        kind=TIMED_OUT,
                        where=process.name,
                        fix="Make it finish, or raise environment.step_deadline_s",
                    ) from error
                if losses > MAX_LOSSES:
                    raise TrajectoryFailed(
                        f"{operation}() lost its environment process {losses} times: {error}",
                        kind="environment lost",
                        where=process.name,
                    ) from error

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))
