"""Quotas: how many bytes the versions of a job may have in the store (`weights.quota_gb`).

A version that would exceed it is refused when it is staged: its trainer waits, as it does for room
on a disk, and no step is lost. Before it comes to that, an event and `meshrl status` tell of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import MeshError, QuotaExceeded
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events, jobs
from meshrl.services.weights.keeping.pins import sizes
from meshrl.services.weights.keeping.records import JobRecords

GIB = 1 << 30
EVENT = "weights_quota"
REFUSED = "weights_refused"
AGAIN_S = 1.0  # between sweeps for a version that is refused; twice as long after each further one
LATEST_AGAIN_S = 60.0
FIX = "`meshrl weights list RUN` says what stays and why: unpin versions, or raise weights.quota_gb"


@dataclass
class _Refusal:
    """A job's version that has no room. Its trainer asks again every moment."""

    version: int
    sweep_at: float  # not before, by the monotonic clock
    again_s: float = AGAIN_S
    why: str = ""  # as it was told


class Quotas:
    """Those of all jobs; `manifest` reads one, `sweep` lets go of what is not needed any more."""

    def __init__(
        self,
        mesh: Mesh,
        records: JobRecords,
        manifest: Callable[[str], Awaitable[Manifest]],
        sweep: Callable[[], Awaitable[None]],
    ) -> None:
        self._mesh, self._records = mesh, records
        self._manifest, self._sweep = manifest, sweep
        self._near: dict[str, str] = {}  # what is told of jobs whose next version has no room
        self._refusals: dict[str, _Refusal] = {}  # by job
        self.refused = 0

    def stats(self) -> dict[str, Any]:
        refused = {job: refusal.why for job, refusal in self._refusals.items() if refusal.why}
        told = self._near | refused
        return {
            "quota_refused": self.refused,
            "quota_trouble": "; ".join(told[job] for job in sorted(told)),
        }

    async def refuse(self, row: jobs.JobRow, offered: Manifest) -> None:
        """QuotaExceeded when the job's versions with this one would have too many bytes."""
        quota, record = quota_of(row), self._records.of(row.id)
        if quota and await self._bytes(record.versions, offered) > quota:
            await self._make_room(row.id, offered.version)
        if not quota or (held := await self._bytes(record.versions, offered)) <= quota:
            self._refusals.pop(row.id, None)
            return
        self.refused += 1
        why = (
            f"with version {offered.version} the versions of {row.id} have "
            f"{shown(held)}, and its quota is {shown(quota)}"
        )
        refusal = self._refusal(row.id, offered.version)
        if not refusal.why:  # once for each version that is refused
            told = {"job": row.id, "version": offered.version, "why": why, "fix": FIX}
            about = told | {"held": held, "quota": quota}
            await events.append(self._mesh.state, REFUSED, about)
        refusal.why = f"{why}: training waits"
        raise QuotaExceeded(why, where="weights.quota_gb", fix=FIX)

    async def _make_room(self, job: str, version: int) -> None:
        """Sweeps at once, and then ever more rarely: who is refused asks again at once, and the
        store sweeps by itself every few seconds.
        """
        now, refusal = self._mesh.clock.monotonic(), self._refusal(job, version)
        if now >= refusal.sweep_at:
            refusal.sweep_at = now + refusal.again_s
            refusal.again_s = min(2 * refusal.again_s, LATEST_AGAIN_S)
            await self._sweep()

    def _refusal(self, job: str, version: int) -> _Refusal:
        """That of the version. A sweep may have let go of it since, and another have taken its
        place.
        """
        found = self._refusals.get(job)
        if found is None or found.version != version:
            found = self._refusals[job] = _Refusal(version, self._mesh.clock.monotonic())
        return found

    async def look(self, rows: Iterable[jobs.JobRow]) -> None:
        near = dict[str, str]()
        waiting = {row.id: row.version for row in rows if not row.ended}
        for job, refusal in list(self._refusals.items()):
            if job not in waiting or waiting[job] > refusal.version:
                del self._refusals[job]  # its job is over, or has gone on
        for row in rows:
            quota = 0 if row.ended else quota_of(row)
            if not quota or not row.manifest:
                continue
            held = await self._bytes(self._records.of(row.id).versions)
            last = await self._bytes([row.manifest])
            if held + last <= quota:
                continue
            near[row.id] = (
                f"the versions of {row.id} have {shown(held)} of {shown(quota)}, "
                f"and the next one needs up to {shown(last)}"
            )
            if row.id not in self._near:
                told = {"job": row.id, "held": held, "next": last, "quota": quota, "fix": FIX}
                await events.append(self._mesh.state, EVENT, told | {"why": near[row.id]})
            self._near[row.id] = near[row.id]
        self._near = near

    async def _bytes(self, digests: Iterable[str], offered: Manifest | None = None) -> int:
        """Bytes of versions, and of one that is offered; a chunk that several have counts once."""
        found = [offered] if offered else []
        for digest in list(digests):
            with suppress(MeshError):  # it takes no room, or the sweep has complained of it
                found.append(await self._manifest(digest))
        return sum(sizes(found).values())


def quota_of(row: jobs.JobRow) -> int:
    return int(row.document.get("weights", {}).get("quota_gb", 0.0) * GIB)


def shown(count: int) -> str:
    return f"{count / GIB:.3g} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.3g} MiB"
