"""Counts lost ranks: reports each loss, and gives up when too many follow each other."""

from __future__ import annotations

from meshrl.common.base.errors import RankLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import events

LOSSES = 3  # losses in a row at one step that end the job: repeating mends nothing


class RankLosses:
    """`in_a_row`: those since the last step that got done."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self.in_a_row = 0

    async def note(self, error: RankLost) -> None:
        """Tell of a loss, once; raise `error` when it is one too many, Fenced without a lease."""
        mesh = self._mesh
        self.in_a_row += 1
        mesh.telemetry.log.warning("step cut off", error=str(error))
        fields = {"job": self._job, "why": str(error)}
        operation = mesh.random.token(8)
        await patiently(
            mesh.clock,
            lambda: events.append_as(
                mesh.state, mesh.name, mesh.token, "rank_lost", fields, operation
            ),
        )
        if self.in_a_row == LOSSES:
            raise error
