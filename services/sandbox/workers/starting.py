"""The processes of a pool: they are started, started again, and their ends are told in words."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgpack

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    BadMessage,
    DeadlineExceeded,
    MeshError,
    PeerLost,
    Refused,
    ToolFailed,
)
from meshrl.common.base.host.settings import WITHOUT_SETTINGS
from meshrl.common.mesh.process.ends import limits as host_limits
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.starting import Spawning
from meshrl.services.sandbox.workers.calls import PoolFunctions, PoolLimits, unpacked_answer
from meshrl.services.sandbox.workers.worker import FORKED, LOADED, OK, OUT_OF_MEMORY

LOAD_S = 30.0  # for the import of the job's modules
ENDING_S = 2.0  # for a killed process to be gone
START_TRIES = 3  # attempts to start a worker before those who wait are told
RETRY_S = 0.2

# One thread for numeric libraries: their pools cost more than they bring, and count as CPU time.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerStarter:
    """Starts the workers of one pool."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        functions: PoolFunctions,
        limits: PoolLimits,
        log: Path | None,
    ) -> None:
        self._host, self._clock, self._log, self._limits = host, clock, log, limits
        self._given, self._job = functions, functions.job
        self.places: dict[str, str] = {}  # where each function begins

    async def restarted(self, failed: Callable[[MeshError], None]) -> Child:
        """A process in place of another; `failed` is told now and then why there is none yet."""
        tries = 0
        while True:
            try:
                return await self._started()
            except (MeshError, OSError) as error:
                tries += 1
                if tries % START_TRIES == 0:
                    fix = host_limits.hit(error)
                    failed(ToolFailed(f"job {self._job}: {error}", fix=fix))
            await self._clock.sleep(min(RETRY_S * tries, LOAD_S))

    async def begun(self) -> Child:
        """A process of a pool that starts. A signal or a busy machine may keep one from its import,
        but hardly START_TRIES of them.
        """
        tries = 1
        while True:
            try:
                return await self._started()
            except ToolFailed as error:
                if error.__cause__ is None or tries == START_TRIES:  # none: the import raised
                    raise
            except OSError as error:  # no process or descriptor is to be had on this host
                if tries == START_TRIES:
                    fix = host_limits.hit(error)
                    raise Refused(f"no process for job {self._job}: {error}", fix=fix) from error
            await self._clock.sleep(RETRY_S * tries)
            tries += 1

    async def _started(self) -> Child:
        nice, rlimits = self._limits.nice, self._limits.rlimits
        child = self._host.spawn(
            [sys.executable, "-m", "meshrl.services.sandbox.workers.worker"],
            name=f"sandbox worker of {self._job}",
            env=ENVIRONMENT | WITHOUT_SETTINGS,
            log=self._log,
            how=Spawning(own_session=True, nice=nice, rlimits=rlimits, pipe=True, guarded=True),
        )
        given = self._given
        setup = [given.directory, given.references, given.servers, given.closed]
        try:
            await child.send(msgpack.packb(setup))
            call_id, status, places, error = unpacked_answer(await child.recv(LOAD_S))
        except (PeerLost, BadMessage, DeadlineExceeded) as problem:
            child.kill()
            raise ToolFailed(
                f"importing {', '.join(given.references.values())} ended the process or took more"
                f" than {LOAD_S:g} s: {problem}",
                where=given.directory,
                fix="import it with plain Python; its output is in the sandbox's log",
            ) from problem
        except BaseException:
            child.kill()
            child.close()
            raise
        if (call_id, status) != (LOADED, OK):
            child.kill()
            raise ToolFailed(
                f"a tool or reward of job {self._job} does not import: {error}",
                where=given.directory,
            )
        self.places = places
        return child

    async def end_of(self, child: Child) -> str:
        """How a worker ended whose channel is closed; empty while it still runs."""
        code = await child.wait(ENDING_S)
        if code is None:
            return ""
        if code == OUT_OF_MEMORY:
            most = self._limits.rlimits.get("AS")
            limit = f"; its limit of address space (RLIMIT_AS) is {most >> 20} MiB" if most else ""
            return f"there was no memory left for it (MemoryError){limit}"
        if code == FORKED:
            return "a child process that it started came back from the function"
        failure = self._host.failure_of(child.pid, None, code)
        if failure is not None:
            return failure.text
        return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
