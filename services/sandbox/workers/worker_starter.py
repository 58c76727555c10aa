"""Starts and restarts of a pool's processes, and descriptions of their ends."""

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
from meshrl.common.base.host.settings import SCRUBBED_ENV
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.diagnosis import host_limits as host_limits
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.services.sandbox.workers.calls import PoolFunctions, PoolLimits, unpack_result
from meshrl.services.sandbox.workers.worker import FORKED, LOAD_RESULT_ID, OK, OUT_OF_MEMORY

IMPORT_TIMEOUT_S = 30.0  # for the import of the job's modules
KILL_TIMEOUT_S = 2.0  # for a killed process to exit
START_TRIES = 3  # attempts to start a worker before its callers get an error
RETRY_S = 0.2

# One thread for numeric libraries: their pools cost more than they gain, and count as CPU time.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerStarter:
    """Starter of the workers of one pool."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        functions: PoolFunctions,
        limits: PoolLimits,
        log: Path | None,
    ) -> None:
        self._host, self._clock, self._log, self._limits = host, clock, log, limits
        self._functions, self._job = functions, functions.job
        self.source_locations: dict[str, str] = {}  # location of each function's code

    async def restart(self, on_failure: Callable[[MeshError], None]) -> ChildProcess:
        """Start a replacement process; report failures to `on_failure` until one runs."""
        tries = 0
        while True:
            try:
                return await self._start()
            except (MeshError, OSError) as error:
                tries += 1
                if tries % START_TRIES == 0:
                    fix = host_limits.explain_hit_limit(error)
                    on_failure(ToolFailed(f"job {self._job}: {error}", fix=fix))
            await self._clock.sleep(min(RETRY_S * tries, IMPORT_TIMEOUT_S))

    async def start_initial(self) -> ChildProcess:
        """Start a process of a new pool.

        A signal or a busy machine may fail one import, but hardly START_TRIES of them.
        """
        tries = 1
        while True:
            try:
                return await self._start()
            except ToolFailed as error:
                if error.__cause__ is None or tries == START_TRIES:  # none: the import raised
                    raise
            except OSError as error:  # no process or descriptor available on this host
                if tries == START_TRIES:
                    fix = host_limits.explain_hit_limit(error)
                    raise Refused(
                        f"no process could be started for job {self._job}: {error}", fix=fix
                    ) from error
            await self._clock.sleep(RETRY_S * tries)
            tries += 1

    async def _start(self) -> ChildProcess:
        nice, rlimits = self._limits.nice, self._limits.rlimits
        child = self._host.spawn(
            [sys.executable, "-m", "meshrl.services.sandbox.workers.worker"],
            name=f"sandbox worker of {self._job}",
            env=ENVIRONMENT | SCRUBBED_ENV,
            log=self._log,
            options=SpawnOptions(
                own_session=True, niceness=nice, rlimits=rlimits, has_channel=True, is_guarded=True
            ),
        )
        given = self._functions
        setup = [given.directory, given.references, given.mcp_servers, given.is_confined]
        try:
            await child.send(msgpack.packb(setup))
            call_id, status, places, error = unpack_result(await child.recv(IMPORT_TIMEOUT_S))
        except (PeerLost, BadMessage, DeadlineExceeded) as problem:
            child.kill()
            raise ToolFailed(
                f"importing {', '.join(given.references.values())} ended the process or took more"
                f" than {IMPORT_TIMEOUT_S:g} s: {problem}",
                where=given.directory,
                fix="Import it with plain Python, and read its output in the sandbox's log",
            ) from problem
        except BaseException:
            child.kill()
            child.close()
            raise
        if (call_id, status) != (LOAD_RESULT_ID, OK):
            child.kill()
            raise ToolFailed(
                f"a tool or reward of job {self._job} cannot be imported: {error}",
                where=given.directory,
            )
        self.source_locations = places
        return child

    async def describe_exit(self, child: ChildProcess) -> str:
        """Describe how a worker with a closed channel ended; empty while it still runs."""
        code = await child.wait(KILL_TIMEOUT_S)
        if code is None:
            return ""
        if code == OUT_OF_MEMORY:
            most = self._limits.rlimits.get("AS")
            limit = f"; its limit of address space (RLIMIT_AS) is {most >> 20} MiB" if most else ""
            return f"the process ran out of memory (MemoryError){limit}"
        if code == FORKED:
            return "a child process of the function returned from it"
        failure = self._host.find_failure(child.pid, None, code)
        if failure is not None:
            return failure.text
        return (
            f"the process ended by {signal.Signals(-code).name}"
            if code < 0
            else f"exit status {code}"
        )
