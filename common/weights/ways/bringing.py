"""Brings what a host lacks of a version: by the way that is chosen, and the rest by the plainest,
which is always there. What it took is held against what was predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from meshrl.common.base.errors import Damaged, MeshError, NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.delta.receiving import from_deltas
from meshrl.common.weights.pull.pull import Wanted, pull
from meshrl.common.weights.store.host_chunks import WantedVersion
from meshrl.common.weights.ways.choosing import Choice, Choosing

EVENT = "weights_way"  # a change of ways, and what came of it: `meshrl weights explain` shows it
LOOK_S = 10.0  # to see what is there
# What the plainest way must bring a second before another is thought of: where it is slower, the
# network is, and what helps there is to send less. A broadcast knows no bounds of a host's rates.
FAST = 100e6
LEAST_BYTES = 8 << 20  # below, what is measured is the time of a few calls


class Way(Protocol):
    """All chunks of a published version are in the store, whatever the way."""

    @property
    def name(self) -> str:
        """For people and for `rollout.weights`."""

    async def receive(self, version: WantedVersion, into: ChunkStore) -> None:
        """Brings chunks that lack as files of `into`, each right before it has its name. It need
        not bring all: what came stays, whatever ends it. MeshError when it can bring no more.
        """


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
        plain = self._plain.name
        if self._how == "pull" or self._how in self._ways:
            asked = plain if self._how == "pull" else self._how
            choice = Choice(asked, "rollout.weights says so")
        else:
            bound = self._mesh.settings.rate_up or self._mesh.settings.rate_down
            fast = not bound and self.choosing.rates().get(plain, 0.0) >= FAST
            choice = self.choosing.choose(size, list(self._ways) if fast else [plain])
        way, why, left = self._ways[choice.way], "", version
        if way is self._plain:
            await way.receive(version, into)
        else:
            try:
                await way.receive(version, into)
            except (NotFound, Damaged):  # of the store: no other way has it either
                raise
            except MeshError as error:
                why = str(error)
            run = self._mesh.host.run_blocking
            lacking = await run(version.still_lacking, into, deadline_s=LOOK_S)
            left = replace(version, lacking=lacking)
            if lacking and not why:
                why = f"{len(lacking)} of {len(version.lacking)} chunks"
        took_s = clock.monotonic() - began
        if why:
            verdict = self.choosing.failed(choice, why)
        else:
            verdict = self.choosing.happened(choice, size, took_s)
        await self._tell(version.job, choice, size, took_s, verdict)
        if why and left.lacking:
            await self._plain.receive(left, into)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last way and why, for published counters; None before the first."""
        return self._last or None

    async def _tell(self, job: str, choice: Choice, size: int, took_s: float, verdict: str) -> None:
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


class PullPath:
    """A way; see `Way`."""

    name = "pull"

    def __init__(self, mesh: Mesh, bulk: BulkClient) -> None:
        self._mesh, self._bulk = mesh, bulk
        self._rate: float | None = None  # bytes a second that came, when much did last

    async def receive(self, version: WantedVersion, into: ChunkStore) -> None:
        """Makes what it can of deltas, and fetches the rest. NotFound, Damaged, StorageFull."""
        about = self._mesh, self._bulk
        made = await from_deltas(*about, version, into, self._rate)
        wanted = [Wanted(one, size) for one, size in version.lacking.items() if one not in made]
        pulled = await pull(*about, wanted, into, made=made, needed=version.needed, job=version.job)
        if pulled.bytes >= LEAST_BYTES and pulled.seconds:
            self._rate = pulled.bytes / pulled.seconds
