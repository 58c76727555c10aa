"""Environment process of a rollout shard: it receives operations in batches. Its exit is reported
as an event, and as an error to its trajectories.
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
START_TIMEOUT_S = 60.0  # importing the author's modules takes time
DEADLINE_GRACE_S = 0.2  # beyond a deadline: this process itself may have been stopped
CLOSE_TIMEOUT_S = 5.0  # for the cleanup of environments, within the stop time of a service
EXIT_TIMEOUT_S = 2.0  # from the end of a process's channel to its exit status
KILLED_STATUS = -9
STOPPED_STATES = "Tt"  # states of a stopped process in /proc


class EnvironmentLost(MeshError):
    """Error raised when the process of an environment has exited; the ledger can rebuild it."""

    code = "environment_lost"
    retryable = True
    overdue_operations = ""  # overdue operation that caused the kill, until it is reported


class EnvironmentHung(EnvironmentLost):
    """Error raised when a running process did not answer an operation that was alone in its
    batch.
    """

    code = "environment_hung"

    def __init__(self, message: str, **about: str) -> None:
        super().__init__(message, **about)
        self.overdue_operations = str(self)


class EnvironmentChild:
    """Child process that runs environments, started on demand."""

    def __init__(
        self, mesh: Mesh, argv: list[str], name: str, log: Path, deadline_s: float, job: str = ""
    ) -> None:
        self._mesh, self._argv, self._log = mesh, argv, log
        self._job, self._reports = job, ExitReportSender(mesh.state, mesh.clock)
        self.name = name
        self._deadline_s = deadline_s
        self._child: ChildProcess | None = None
        self._is_starting = True  # no answer yet

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
        """Report the loss of a process noticed by `error`. Return EnvironmentLost if a new process
        may serve its callers, or ConfigError if each process would exit the same way.
        """
        name, log, job = child.name, str(self._log), self._job
        code = await child.wait(EXIT_TIMEOUT_S) if isinstance(error, PeerLost) else child.poll()
        if code is None:  # it runs, and is killed because it does not answer
            why = f"the process was killed: {error}"
            await self._reports.report(
                ExitReport(name, KILLED_STATUS, why, job=job, log=log, charge_job=False)
            )
            return EnvironmentLost(f"environment process {name}: {error}")
        failure = self._mesh.host.find_failure(child.pid, self._log, code) if code else None
        why = f"signal {-code}" if code < 0 else f"exit status {code}"
        final = failure is not None and failure.is_fatal
        # A crash fails the trajectories in the process, and their number is limited
        # (`FailureReporter`).
        charged = failure is not None
        await self._reports.report(
            ExitReport(name, code, why, failure, job, final=final, log=log, charge_job=charged)
        )
        if failure is not None and failure.is_fatal:
            return ConfigError(failure.text, where=failure.where, fix=failure.fix)
        cause = (
            str(failure)
            if failure is not None
            else f"{why}; its log ends: {read_log_end(self._log)}"
        )
        return EnvironmentLost(f"environment process {name} exited: {cause}")

    async def _stop_child(self) -> None:
        """Stop the process, with a time limit for the cleanup of its environments."""
        self._reports.stop()
        child, self._child = self._child, None
        if child is not None:
            await stop_child(child)


class EnvironmentProcess(EnvironmentChild):
    """Environment process that batches its queued operations and kills a process that exceeds the
    deadline.
    """

    def __init__(
        self, mesh: Mesh, argv: list[str], name: str, log: Path, deadline_s: float, job: str = ""
    ) -> None:
        super().__init__(mesh, argv, name, log, deadline_s, job)
        self._batcher: Batcher[Operation, Any] = Batcher(self._exchange)

    def submit(self, operation: Operation, *, unbatched: bool = False) -> asyncio.Future[Any]:
        return self._batcher.submit(operation, unbatched=unbatched)

    async def _exchange(self, batch: list[Operation]) -> list[Any]:
        """Exchange a batch: return an answer per operation. An operation that cannot be serialized
        fails and is not sent.
        """
        messages: list[Any] = [
            encode_operation(operation, operation[1], self.name) for operation in batch
        ]
        sent = [i for i, message in enumerate(messages) if isinstance(message, bytes)]
        if sent:
            blocks = build_frames(messages[i] for i in sent)
            answers = await self._send_batch([batch[i] for i in sent], list(blocks))
            for i, answer in zip(sent, answers, strict=True):
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
                return [EnvironmentHung(f"{batch[0][1]}() took longer than {deadline_s:.0f} s")]
            if late and isinstance(lost, EnvironmentLost):
                names = sorted({f"{operation[1]}()" for operation in batch})
                lost.overdue_operations = (
                    f"{' or '.join(names)} took longer than {deadline_s:.0f} s"
                )
            return [lost] * len(batch)
        self._is_starting = False
        return [decode_answer(status, value, self.name) for _, status, value in answers]

    async def close(self) -> None:
        await self._batcher.close()
        await self._stop_child()


def is_stopped(child: ChildProcess | None) -> bool:
    """Return True if a signal has stopped a running process."""
    usage = child.read_usage() if child is not None else None
    return usage is not None and usage.state in STOPPED_STATES


async def stop_child(child: ChildProcess) -> None:
    """Stop a process by closing its channel; kill it after the time limit."""
    child.close()
    try:
        await child.wait(CLOSE_TIMEOUT_S)
    finally:
        child.kill()
    await child.wait(5.0)


def count_deadlines(operation: Operation) -> int:
    """Return the number of deadlines of an operation: a restore repeats all operations of its
    episode.
    """
    _, name, argument = operation
    return 1 + len(argument[1]) if name == "restore" else 1


def encode_operation(message: Any, operation: str, process_name: str) -> bytes | ToolFailed:
    """Encode an operation for the process, or return the failure if it cannot be serialized."""
    try:
        return pack_message(message)
    except BadMessage as error:
        return ToolFailed(
            f"an argument of {operation}() cannot be serialized: {error}", where=process_name
        )


def decode_answer(status: str, value: Any, process_name: str) -> Any:
    """Decode an answer of a process: return its value or its error."""
    if status == "ok":
        return value
    if status == "unknown":
        return EnvironmentLost(str(value))
    return TrajectoryFailed(
        f"the environment raised {value}",
        kind="environment raised",
        detail=str(value),
        fix=f"Correct the job's module; its output is in the log of {process_name}",
    )
