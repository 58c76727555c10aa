"""Why an environment process has gone: told as an event, and as an error to its trajectories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError, MeshError, PeerLost
from common.mesh.process.ends.failure import end_of
from common.mesh.process.handle import Child
from common.mesh.process.supervision.ended import EndReport, Reports
from common.mesh.runtime.mesh import Mesh

KILLED = -9
ENDING_S = 2.0  # from the end of its channel until its exit status can be read


class EnvironmentLost(MeshError):
    """The process that held the environment has died; it can be rebuilt from the log."""

    code = "environment_lost"
    retryable = True
    late = ""  # what was out when it was killed for being late, until somebody has told of it


class EnvironmentEnds:
    """Those of the processes of one job."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self._reports = Reports(mesh.state, mesh.clock)

    async def lost(
        self, child: Child, log: Path, error: BaseException
    ) -> EnvironmentLost | ConfigError:
        """What those get who waited for it: EnvironmentLost, after which a new one may serve them;
        ConfigError where every process would end so. `error` is how its loss was noticed.
        """
        code = await child.wait(ENDING_S) if isinstance(error, PeerLost) else child.poll()
        if code is None:  # it runs, and is killed for what it does not do
            why = f"it was killed: {error}"
            await self._tell(EndReport(child.name, KILLED, why, log=str(log), charged=False))
            return EnvironmentLost(f"environment process {child.name}: {error}")
        failure = self._mesh.host.failure_of(child.pid, log, code) if code else None
        why = f"signal {-code}" if code < 0 else f"exit status {code}"
        final = failure is not None and failure.fatal
        # A crash fails the trajectories that were in it, whose number is bounded (`Failures`).
        charged = failure is not None
        await self._tell(
            EndReport(child.name, code, why, failure, final=final, log=str(log), charged=charged)
        )
        if failure is not None and failure.fatal:
            return ConfigError(failure.text, where=failure.where, fix=failure.fix)
        said = str(failure) if failure is not None else f"{why}; its log ends: {end_of(log)}"
        return EnvironmentLost(f"environment process {child.name} ended: {said}")

    async def _tell(self, report: EndReport) -> None:
        await self._reports.tell(replace(report, job=self._job))

    def stop(self) -> None:
        """Drops what could not be told."""
        self._reports.stop()
