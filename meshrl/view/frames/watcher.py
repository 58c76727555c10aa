"""Snapshots of a mesh one after the other, with what those before tell of rates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from common.state import steps
from common.state.jobs import JobRow
from common.state.pool.store.explained import Judged
from common.state.redis.client import State
from meshrl.view.frames.frame import CURVE, Frame
from meshrl.view.frames.making import frame, shards_of
from meshrl.view.mesh.rates import TokenRate
from meshrl.view.mesh.snapshot import MeshSnapshot, Rows, read_mesh


class MeshWatcher:
    """Looks at all jobs of a mesh that go on, and at those that have ended since it began."""

    def __init__(self, state: State, root: str) -> None:
        self._state, self._root, self._began = state, root, time.monotonic()
        self._shown: set[str] = set()
        self._steps: dict[str, Rows] = {}
        self._rates: dict[str, TokenRate] = {}
        self._rolled_out: dict[str, float] = {}
        self.mesh = MeshSnapshot()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    async def look(self) -> MeshSnapshot:
        """The mesh now. StateUnavailable, DeadlineExceeded."""
        found = await read_mesh(self._state)
        rows = [row for row in found.jobs if not row.ended or row.id in self._shown]
        for row in rows:
            if not row.ended or row.id not in self._steps:
                await self._follow(row)
        self._shown |= {row.id for row in rows}
        self.mesh = replace(found, jobs=rows, steps=dict(self._steps))
        for row in rows:
            tokens = sum(float(e.stats.get("tokens", 0)) for e in shards_of(self.mesh, row.id))
            rate = self._rates.setdefault(row.id, TokenRate())
            self._rolled_out[row.id] = rate.see(self.elapsed_s, tokens)
        return self.mesh

    async def watch(self) -> Self:
        """Look, for a view of the mesh and its frame."""
        await self.look()
        return self

    def frame(self, judged: Sequence[Judged] = ()) -> Frame:
        """The last look as a frame."""
        return frame(self.mesh, self._rolled_out, self._root, judged)

    async def _follow(self, row: JobRow) -> None:
        """The last rows of a job's steps; those that a new lineage has left behind are gone."""
        known = [r for r in self._steps.get(row.id, ()) if int(r["step"]) <= row.steps_done]
        last = int(known[-1]["step"]) if known else max(0, row.steps_done - CURVE)
        if last < row.steps_done:
            known += await steps.step_rows(self._state, row.id, since=last)
        self._steps[row.id] = known[-CURVE:]
