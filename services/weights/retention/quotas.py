"""Quotas of bytes that the versions of a job may have in the store (`weights.quota_gb`).

A version that would exceed the quota is rejected when it is staged. Its trainer waits, as for disk
space, and no step is lost. An event and `meshrl status` warn before that.
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
RETRY_SWEEP_S = 1.0  # between sweeps for a rejected version, doubled after each one
MAX_RETRY_SWEEP_S = 60.0
QUOTA_FIX = "Unpin versions, which `meshrl weights list RUN` lists, or raise weights.quota_gb"


@dataclass
class _QuotaRejection:
    """Rejected version of a job; its trainer retries continuously."""

    version: int
    next_sweep_at: float  # on the monotonic clock
    retry_s: float = RETRY_SWEEP_S
    reason: str = ""  # as reported


class VersionQuotas:
    """Quotas of all jobs."""

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
        ] = {}  # warnings of jobs whose next version exceeds the quota
        self._rejections: dict[str, _QuotaRejection] = {}  # by job
        self.rejection_count = 0

    def stats(self) -> dict[str, Any]:
        refused = {
            job: refusal.reason for job, refusal in self._rejections.items() if refusal.reason
        }
        reasons_by_job = self._nearly_full | refused
        return {
            "quota_refused": self.rejection_count,
            "quota_trouble": "; ".join(reasons_by_job[job] for job in sorted(reasons_by_job)),
        }

    async def check_quota(self, row: jobs.JobRow, offered: Manifest) -> None:
        """Raise QuotaExceeded if the job's versions with the offered one would exceed its quota."""
        quota, record = read_quota_bytes(row), self._records.get_or_create(row.id)
        if quota and await self._compute_bytes(record.versions, offered) > quota:
            await self._sweep_if_due(row.id, offered.version)
        if (
            not quota
            or (required_bytes := await self._compute_bytes(record.versions, offered)) <= quota
        ):
            self._rejections.pop(row.id, None)
            return
        self.rejection_count += 1
        why = (
            f"with version {offered.version} the versions of {row.id} would take "
            f"{format_bytes(required_bytes)}, and its quota is {format_bytes(quota)}"
        )
        refusal = self._get_rejection(row.id, offered.version)
        if not refusal.reason:  # once for each rejected version
            fields = {"job": row.id, "version": offered.version, "why": why, "fix": QUOTA_FIX}
            about = fields | {"held": required_bytes, "quota": quota}
            await events.append(self._mesh.state, REJECTED_EVENT, about)
        refusal.reason = f"{why}: training waits"
        raise QuotaExceeded(why, where="weights.quota_gb", fix=QUOTA_FIX)

    async def _sweep_if_due(self, job: str, version: int) -> None:
        """Sweep at once, then with growing intervals.

        A rejected trainer retries at once, and the store sweeps every few seconds anyway.
        """
        now, refusal = self._mesh.clock.monotonic(), self._get_rejection(job, version)
        if now >= refusal.next_sweep_at:
            refusal.next_sweep_at = now + refusal.retry_s
            refusal.retry_s = min(2 * refusal.retry_s, MAX_RETRY_SWEEP_S)
            await self._sweep()

    def _get_rejection(self, job: str, version: int) -> _QuotaRejection:
        """Return the version's rejection; a sweep may have removed or replaced it."""
        found = self._rejections.get(job)
        if found is None or found.version != version:
            found = self._rejections[job] = _QuotaRejection(version, self._mesh.clock.monotonic())
        return found

    async def update(self, rows: Iterable[jobs.JobRow]) -> None:
        near = dict[str, str]()
        waiting = {row.id: row.version for row in rows if not row.is_terminal}
        for job, refusal in list(self._rejections.items()):
            if job not in waiting or waiting[job] > refusal.version:
                del self._rejections[job]  # its job has ended or continued
        for row in rows:
            quota = 0 if row.is_terminal else read_quota_bytes(row)
            if not quota or not row.manifest:
                continue
            used_bytes = await self._compute_bytes(self._records.get_or_create(row.id).versions)
            last = await self._compute_bytes([row.manifest])
            if used_bytes + last <= quota:
                continue
            near[row.id] = (
                f"the versions of {row.id} take {format_bytes(used_bytes)} of "
                f"{format_bytes(quota)}, and the next one needs up to {format_bytes(last)}"
            )
            if row.id not in self._nearly_full:
                fields = {
                    "job": row.id,
                    "held": used_bytes,
                    "next": last,
                    "quota": quota,
                    "fix": QUOTA_FIX,
                }
                await events.append(self._mesh.state, QUOTA_EVENT, fields | {"why": near[row.id]})
            self._nearly_full[row.id] = near[row.id]
        self._nearly_full = near

    async def _compute_bytes(self, digests: Iterable[str], offered: Manifest | None = None) -> int:
        """Return the bytes of versions and an offered one; shared chunks count once."""
        found = [offered] if offered else []
        for digest in list(digests):
            with suppress(MeshError):  # it takes no space, or the sweep has reported it
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
