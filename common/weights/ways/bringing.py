"""Brings what a host lacks of a version: by the way that is chosen, and the rest by the plainest,
which is always there. What it took is held against what was predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.base.errors import Damaged, MeshError, NotFound
from common.mesh.runtime.mesh import Mesh
from common.state import events
from common.weights.chunks.chunks import ChunkStore
from common.weights.ways.base import WantedVersion, Way
from common.weights.ways.choosing import Choice, Choosing

EVENT = "weights_way"  # a change of ways, and what came of it: `meshrl weights explain` shows it
LOOK_S = 10.0  # to see what is there
# What the plainest way must bring a second before another is thought of: where it is slower, the
# network is, and what helps there is to send less. A broadcast knows no bounds of a host's rates.
FAST = 100e6


class Bringing:
    """One for a process that receives versions, one after the other."""

    def __init__(self, mesh: Mesh, ways: Sequence[Way], how: str = "auto") -> None:
        """`ways`: the plainest first. `how`: `auto`, `pull` (the plainest), or the name of the one
        that is to be taken.
        """
        self._mesh, self._ways, self._how = mesh, {way.name: way for way in ways}, how
        self._plain = ways[0]
        self.choosing = Choosing()
        self._last: dict[str, Any] = {}

    async def bring(self, version: WantedVersion, into: ChunkStore) -> None:
        """Returns once it has tried; what lacks then, the store does not have as it was written,
        and NotFound or Damaged says so. StorageFull.
        """
        clock, began = self._mesh.clock, self._mesh.clock.monotonic()
        size = version.bytes
        choice = self._chosen(size)
        why = await self._tried(self._ways[choice.way], version, into)
        if why and choice.way != self._plain.name:
            verdict = self.choosing.failed(choice, why)
            await self._tell(version.job, choice, size, clock.monotonic() - began, verdict)
            left = await self._left(version, into)
            if left.lacking:
                await self._plain.receive(left, into)
            return
        took_s = clock.monotonic() - began
        verdict = self.choosing.happened(choice, size, took_s)
        await self._tell(version.job, choice, size, took_s, verdict)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last way and why, for published counters; None before the first."""
        return self._last or None

    def _chosen(self, size: int) -> Choice:
        if self._how in self._ways:
            return Choice(self._how, "rollout.weights says so")
        plain = self._plain.name
        if self._how == "pull":
            return Choice(plain, "rollout.weights says so")
        bound = self._mesh.settings.rate_up or self._mesh.settings.rate_down
        fast = not bound and self.choosing.rates().get(plain, 0.0) >= FAST
        return self.choosing.choose(size, list(self._ways) if fast else [plain])

    async def _tried(self, way: Way, version: WantedVersion, into: ChunkStore) -> str:
        """Why the way did not bring all; empty: it did."""
        try:
            await way.receive(version, into)
        except (NotFound, Damaged):  # of the store: no other way has it either
            raise
        except MeshError as error:
            if way is self._plain:
                raise
            return str(error)
        left = await self._left(version, into)
        return f"{len(left.lacking)} of {len(version.lacking)} chunks" if left.lacking else ""

    async def _left(self, version: WantedVersion, into: ChunkStore) -> WantedVersion:
        def lacking() -> dict[str, int]:
            return {d: size for d, size in version.lacking.items() if not into.has(d)}

        found = await self._mesh.host.run_blocking(lacking, deadline_s=LOOK_S)
        return replace(version, lacking=found)

    async def _tell(self, job: str, choice: Choice, size: int, took_s: float, verdict: str) -> None:
        """Keeps what happened for whoever asks, and tells of changes."""
        changed = choice.way != self._last.get("way")
        told = {
            "way": choice.way,
            "why": choice.why,
            "verdict": verdict,
            "bytes": size,
            "took_s": round(took_s, 4),
            "predicted_s": choice.predicted_s,
            "rates": {way: round(rate) for way, rate in self.choosing.rates().items()},
        }
        self._last = told
        if not changed and not choice.instead_of:
            return
        mesh = self._mesh
        about = {"job": job, "process": mesh.name, "host": mesh.settings.host, **told}
        mesh.telemetry.log.info("weights", **about)
        try:
            await events.append(mesh.state, EVENT, about)
        except MeshError as error:  # weights do not wait for the record of their way
            mesh.telemetry.log.warning("weights", error=str(error))
