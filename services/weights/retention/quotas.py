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
from meshrl.services.weights.retention.job_records import JobRecords
from meshrl.services.weights.retention.pins import compute_chunk_sizes

GIB = 1 << 30
QUOTA_EVENT = "weights_quota"
REJECTED_EVENT = "weights_refused"
RETRY_SWEEP_S = (
    1.0  # between sweeps for a version that is refused; twice as long after each further one
)
MAX_RETRY_SWEEP_S = 60.0
QUOTA_FIX = (
    "`meshrl weights list RUN` says what stays and why: unpin versions, or raise weights.quota_gb"
)


@dataclass
class _QuotaRejection:
    """A job's version that has no room. Its trainer asks again every moment."""

    version: int
    next_sweep_at: float  # not before, by the monotonic clock
    retry_s: float = RETRY_SWEEP_S
    reason: str = ""  # as it was told


class VersionQuotas:
    """Those of all jobs; `manifest` reads one, `sweep` lets go of what is not needed any more."""

    def __init__(
        self,
        mesh: Mesh,
        records: JobRecords,
        read_manifest: Callable[[str], Awaitable[Manifest]],
        sweep: Callable[[], Awaitable[None]],
    ) -> None:
        self._mesh, self._records = mesh, records
        self._read_manifest, self._sweep = read_manifest, sweep
        self._nearly_full: dict[
            str, str
        ] = {}  # what is told of jobs whose next version has no room
        self._rejections: dict[str, _QuotaRejection] = {}  # by job
        self.rejection_count = 0

    def stats(self) -> dict[str, Any]:
        refused = {
            job: refusal.reason for job, refusal in self._rejections.items() if refusal.reason
        }
        told = self._nearly_full | refused
        return {
            "quota_refused": self.rejection_count,
            "quota_trouble": "; ".join(told[job] for job in sorted(told)),
        }

    async def check_quota(self, row: jobs.JobRow, offered: Manifest) -> None:
        """QuotaExceeded when the job's versions with this one would have too many bytes."""
        quota, record = read_quota_bytes(row), self._records.get_or_create(row.id)
        if quota and await self._compute_bytes(record.versions, offered) > quota:
            await self._sweep_if_due(row.id, offered.version)
        if not quota or (held := await self._compute_bytes(record.versions, offered)) <= quota:
            self._rejections.pop(row.id, None)
            return
        self.rejection_count += 1
        why = (
            f"with version {offered.version} the versions of {row.id} have "
            f"{format_bytes(held)}, and its quota is {format_bytes(quota)}"
        )
        refusal = self._get_rejection(row.id, offered.version)
        if not refusal.reason:  # once for each version that is refused
            told = {"job": row.id, "version": offered.version, "why": why, "fix": QUOTA_FIX}
            about = told | {"held": held, "quota": quota}
            await events.append(self._mesh.state, REJECTED_EVENT, about)
        refusal.reason = f"{why}: training waits"
        raise QuotaExceeded(why, where="weights.quota_gb", fix=QUOTA_FIX)

    async def _sweep_if_due(self, job: str, version: int) -> None:
        """Sweeps at once, and then ever more rarely: who is refused asks again at once, and the
        store sweeps by itself every few seconds.
        """
        now, refusal = self._mesh.clock.monotonic(), self._get_rejection(job, version)
        if now >= refusal.next_sweep_at:
            refusal.next_sweep_at = now + refusal.retry_s
            refusal.retry_s = min(2 * refusal.retry_s, MAX_RETRY_SWEEP_S)
            await self._sweep()

    def _get_rejection(self, job: str, version: int) -> _QuotaRejection:
        """That of the version. A sweep may have let go of it since, and another have taken its
        place.
        """
        found = self._rejections.get(job)
        if found is None or found.version != version:
            found = self._rejections[job] = _QuotaRejection(version, self._mesh.clock.monotonic())
        return found

    async def update(self, rows: Iterable[jobs.JobRow]) -> None:
        near = dict[str, str]()
        waiting = {row.id: row.version for row in rows if not row.is_terminal}
        for job, refusal in list(self._rejections.items()):
            if job not in waiting or waiting[job] > refusal.version:
                del self._rejections[job]  # its job is over, or has gone on
        for row in rows:
            quota = 0 if row.is_terminal else read_quota_bytes(row)
            if not quota or not row.manifest:
                continue
            held = await self._compute_bytes(self._records.get_or_create(row.id).versions)
            last = await self._compute_bytes([row.manifest])
            if held + last <= quota:
                continue
            near[row.id] = (
                f"the versions of {row.id} have {format_bytes(held)} of {format_bytes(quota)}, "
                f"and the next one needs up to {format_bytes(last)}"
            )
            if row.id not in self._nearly_full:
                told = {"job": row.id, "held": held, "next": last, "quota": quota, "fix": QUOTA_FIX}
                await events.append(self._mesh.state, QUOTA_EVENT, told | {"why": near[row.id]})
            self._nearly_full[row.id] = near[row.id]
        self._nearly_full = near

    async def _compute_bytes(self, digests: Iterable[str], offered: Manifest | None = None) -> int:
        """Bytes of versions, and of one that is offered; a chunk that several have counts once."""
        found = [offered] if offered else []
        for digest in list(digests):
            with suppress(MeshError):  # it takes no room, or the sweep has complained of it
                found.append(await self._read_manifest(digest))
        return sum(compute_chunk_sizes(found).values())


def read_quota_bytes(row: jobs.JobRow) -> int:
    return int(row.document.get("weights", {}).get("quota_gb", 0.0) * GIB)


def format_bytes(size_bytes: int) -> str:
    return (
        f"{size_bytes / GIB:.3g} GiB"
        if size_bytes >= GIB // 10
        else f"{size_bytes / (1 << 20):.3g} MiB"
    )
