"""An environment process of a rollout shard: sends it operations in batches, notices its end, and
tells of that as an event and as an error to its trajectories.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack

from meshrl.common.base.errors import (
    BadMessage,
    ConfigError,
    DeadlineExceeded,
    MeshError,
    PeerLost,
    ToolFailed,
)
from meshrl.common.base.host.settings import SCRUBBED_ENV
from meshrl.common.environment.framing import build_frames, pack_message
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.diagnosis.failure import read_log_end
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.mesh.process.supervision.exit_reports import ExitReport, ExitReportSender
from meshrl.common.mesh.runtime.calls.batcher import Batcher
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.rollout.trajectories.failures import TrajectoryFailed

Operation = tuple[int, str, Any]  # trajectory, operation, argument
START_TIMEOUT_S = 60.0  # importing the author's modules may take its time
DEADLINE_GRACE_S = 0.2  # past a deadline: this process itself may have been stopped until then
CLOSE_TIMEOUT_S = (
    5.0  # for what environments clean up at the end, within what a service's stop may take
)
EXIT_TIMEOUT_S = 2.0  # from the end of a process's channel until its exit status can be read
KILLED_STATUS = -9
STOPPED_STATES = "Tt"  # states of a process that was stopped, in /proc


class EnvironmentLost(MeshError):
    """The process that held the environment has died; it can be rebuilt from the log."""

    code = "environment_lost"
    retryable = True
    overdue_operations = (
        ""  # what was out when it was killed for being late, until somebody has told of it
    )


class EnvironmentHung(EnvironmentLost):
    """A running process did not answer one operation, which was alone in its batch."""

    code = "environment_hung"

    def __init__(self, message: str, **about: str) -> None:
        super().__init__(message, **about)
        self.overdue_operations = str(self)


class EnvironmentChild:
    """A process that holds environments, and is started when it is needed."""

    def __init__(
        self, mesh: Mesh, argv: list[str], name: str, log: Path, deadline_s: float, job: str = ""
    ) -> None:
        self._mesh, self._argv, self._log = mesh, argv, log
        self._job, self._reports = job, ExitReportSender(mesh.state, mesh.clock)
        self.name = name
        self._deadline_s = deadline_s
        self._child: ChildProcess | None = None
        self._is_starting = True  # it has answered nothing yet

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self._child)

    def _spawn(self) -> ChildProcess:
        self._is_starting = True
        self._child = self._mesh.host.spawn(
            self._argv,
            name=self.name,
            env=SCRUBBED_ENV,
            log=self._log,
            options=SpawnOptions(has_channel=True, is_guarded=True),
        )
        return self._child

    async def _report_loss(
        self, child: ChildProcess, error: BaseException
    ) -> EnvironmentLost | ConfigError:
        """What those get who waited for it: EnvironmentLost, after which a new one may serve them;
        ConfigError where every process would end so. `error` is how its loss was noticed.
        """
        name, log, job = child.name, str(self._log), self._job
        code = await child.wait(EXIT_TIMEOUT_S) if isinstance(error, PeerLost) else child.poll()
        if code is None:  # it runs, and is killed for what it does not do
            why = f"it was killed: {error}"
            await self._reports.report(
                ExitReport(name, KILLED_STATUS, why, job=job, log=log, charged=False)
            )
            return EnvironmentLost(f"environment process {name}: {error}")
        failure = self._mesh.host.find_failure(child.pid, self._log, code) if code else None
        why = f"signal {-code}" if code < 0 else f"exit status {code}"
        final = failure is not None and failure.is_fatal
        # A crash fails the trajectories that were in it, whose number is bounded
        # (`FailureReporter`).
        charged = failure is not None
        await self._reports.report(
            ExitReport(name, code, why, failure, job, final=final, log=log, charged=charged)
        )
        if failure is not None and failure.is_fatal:
            return ConfigError(failure.text, where=failure.where, fix=failure.fix)
        said = (
            str(failure)
            if failure is not None
            else f"{why}; its log ends: {read_log_end(self._log)}"
        )
        return EnvironmentLost(f"environment process {name} ended: {said}")

    async def _stop_child(self) -> None:
        """Lets the process clean up what its environments hold, as far as that ends soon."""
        self._reports.stop()
        child, self._child = self._child, None
        if child is not None:
            await stop_child(child)


class EnvironmentProcess(EnvironmentChild):
    """One process; operations queue into batches, a hang past the deadline kills it."""

    def __init__(
        self, mesh: Mesh, argv: list[str], name: str, log: Path, deadline_s: float, job: str = ""
    ) -> None:
        super().__init__(mesh, argv, name, log, deadline_s, job)
        self._batcher: Batcher[Operation, Any] = Batcher(self._exchange)

    def submit(self, operation: Operation, *, unbatched: bool = False) -> asyncio.Future[Any]:
        return self._batcher.submit(operation, unbatched=unbatched)

    async def _exchange(self, batch: list[Operation]) -> list[Any]:
        """An answer to each operation; one that cannot travel fails here, and is not sent."""
        messages: list[Any] = [
            encode_operation(operation, operation[1], self.name) for operation in batch
        ]
        sent = [i for i, message in enumerate(messages) if isinstance(message, bytes)]
        if sent:
            blocks = build_frames(messages[i] for i in sent)
            told = await self._send_batch([batch[i] for i in sent], list(blocks))
            for i, answer in zip(sent, told, strict=True):
                messages[i] = answer
        return messages

    async def _send_batch(self, batch: list[Operation], blocks: list[bytes]) -> list[Any]:
        child = self._child or self._spawn()
        deadline_s = self._deadline_s * max(count_deadlines(operation) for operation in batch)
        deadline_s += START_TIMEOUT_S if self._is_starting else 0.0
        answers: list[Any] = []
        try:
            with self._mesh.wait(batch[0][1], on=self.name):
                for block in blocks:
                    await child.send(block)
                    try:
                        answer = await child.recv(deadline_s)
                    except DeadlineExceeded:
                        answer = await child.recv(DEADLINE_GRACE_S)
                    answers += msgpack.unpackb(answer, raw=False)
        except (OSError, EOFError, ValueError, MeshError) as error:
            late = isinstance(error, DeadlineExceeded) and not is_stopped(child)
            lost = await self._report_loss(child, error)
            self._child = None
            child.kill()
            await child.wait(5.0)
            if late and len(batch) == 1:
                return [EnvironmentHung(f"{batch[0][1]}() took over {deadline_s:.0f} s")]
            if late and isinstance(lost, EnvironmentLost):
                names = sorted({f"{operation[1]}()" for operation in batch})
                lost.overdue_operations = f"{' or '.join(names)} took over {deadline_s:.0f} s"
            return [lost] * len(batch)
        self._is_starting = False
        return [decode_answer(status, value, self.name) for _, status, value in answers]

    async def close(self) -> None:
        await self._batcher.close()
        await self._stop_child()


def is_stopped(child: ChildProcess | None) -> bool:
    """True if a signal has stopped a process that runs."""
    usage = child.read_usage() if child is not None else None
    return usage is not None and usage.state in STOPPED_STATES


async def stop_child(child: ChildProcess) -> None:
    """Ends a process by the end of its channel; by force if it has not ended in ORDERLY_S."""
    child.close()
    try:
        await child.wait(CLOSE_TIMEOUT_S)
    finally:
        child.kill()
    await child.wait(5.0)


def count_deadlines(operation: Operation) -> int:
    """Deadlines that an operation may take: a restore repeats all that its episode was told."""
    _, name, argument = operation
    return 1 + len(argument[1]) if name == "restore" else 1


def encode_operation(message: Any, operation: str, process_name: str) -> bytes | ToolFailed:
    """An operation as the process gets it, or the failure of one that cannot travel."""
    try:
        return pack_message(message)
    except BadMessage as error:
        return ToolFailed(
            f"{operation}() was given what cannot travel: {error}", where=process_name
        )


def decode_answer(status: str, value: Any, process_name: str) -> Any:
    """What an answer of a process means: its value, or the error that it stands for."""
    if status == "ok":
        return value
    if status == "unknown":
        return EnvironmentLost(str(value))
    return TrajectoryFailed(
        f"the environment raised {value}",
        kind="environment raised",
        detail=str(value),
        fix=f"see the job's module; what it prints is in the log of {process_name}",
    )
