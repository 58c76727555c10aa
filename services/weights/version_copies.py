"""Copier of permanent versions to the job's target (`weights.copies`), in the background.

A separate process writes each version as a Hugging Face directory:

    <copies>/<job>/<lineage>-<version>-<digits of the manifest>/

Nothing is removed there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded, MeshError, StateUnavailable, from_wire
from meshrl.common.base.files.remote_directory import redact_url
from meshrl.common.mesh.process.command_output import run_for_lines
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.services.weights.durable_copier import append_event_with_retry
from meshrl.services.weights.retention.job_records import IO_TIMEOUT_S, JobRecords
from meshrl.services.weights.retention.pins import read_pins
from meshrl.services.weights.retention.policy import VersionNumber, find_requested

POLL_S = 2.0  # between checks for versions to copy
RETRY_S = 5.0  # after an error, doubled after each further one
MAX_RETRY_S = 60.0
# for all versions found by one poll: they may have hundreds of GB, and links may be slow
COPY_TIMEOUT_S = 6 * 3600.0
MAX_SHOWN_FAILURES = 3  # per job, that are reported


@dataclass
class _CopyFailure:
    retry_at: float  # on the monotonic clock
    retry_s: float
    version_name: str
    error: str


class VersionCopier:
    def __init__(
        self, mesh: Mesh, records: JobRecords, store: Path, poll_s: float = POLL_S
    ) -> None:
        self._mesh, self._records, self._store, self._poll_s = mesh, records, store, poll_s
        self._copied_manifests: dict[
            tuple[str, str], set[str]
        ] = {}  # manifests by run directory and target
        self._failures: dict[str, dict[str, _CopyFailure]] = {}  # by job and manifest
        self.copied_count = 0

    def stats(self) -> dict[str, Any]:
        summaries = []
        for job, failures in sorted(self._failures.items()):
            whys = [
                f"version {failure.version_name}: {failure.error}" for failure in failures.values()
            ]
            more = (
                [f"and {len(whys) - MAX_SHOWN_FAILURES} more"]
                if len(whys) > MAX_SHOWN_FAILURES
                else []
            )
            summaries += (
                [f"{job}: {', '.join([*whys[:MAX_SHOWN_FAILURES], *more])}"] if whys else []
            )
        return {"versions_copied": self.copied_count, "copies_trouble": "; ".join(summaries)}

    async def run(self) -> None:
        while True:
            await self._mesh.clock.sleep(self._poll_s)
            try:
                rows = await jobs.read_jobs(self._mesh.state)
            except StateUnavailable:
                continue  # no step is committed without Redis
            for row in rows:
                await self._copy_missing(row)
            self._failures = {row.id: self._failures.get(row.id, {}) for row in rows}

    async def _copy_missing(self, row: jobs.JobRow) -> None:
        place = row.document.get("weights", {}).get("copies", "")
        failures = self._failures.setdefault(row.id, {})
        if not place:
            failures.clear()
            return
        there = self._copied_manifests.setdefault((row.run_dir, place), set())
        try:
            run = self._mesh.host.run_blocking
            pinned = await run(read_pins, self._store, row.id, deadline_s=IO_TIMEOUT_S)
        except StateUnavailable:
            return
        except (MeshError, OSError) as error:
            self._mesh.telemetry.log.warning("copies", job=row.id, error=str(error))
            return
        current, weights_settings = VersionNumber(row.lineage, row.version), row.document["weights"]
        retained = find_requested(
            self._records.get_or_create(row.id).versions, current, weights_settings
        )
        # Versions that only a user or a better version removes, and the last one of a finished job.
        lacking = {manifest for manifest, key in retained.items() if key == "keep_every"}
        lacking |= {manifest for manifest, pin in pinned.items() if pin.run == row.run_dir}
        lacking |= {row.best_manifest} | ({row.manifest} if row.is_terminal else set())
        lacking -= there | {""}
        for manifest in failures.keys() - lacking:
            del failures[manifest]  # it will be deleted
        now = self._mesh.clock.monotonic()
        due = {m for m in lacking if m not in failures or now >= failures[m].retry_at}
        if due:
            # Failed ones come last: one that crashes its process delays no other.
            await self._copy_versions(
                row, place, sorted(due, key=lambda m: (m in failures, m)), there
            )

    async def _copy_versions(
        self, row: jobs.JobRow, target_url: str, manifests: list[str], copied_manifests: set[str]
    ) -> None:
        """Copy versions in a subprocess; a failure of one does not stop the others.

        Versions without an outcome, because their process exited early, are due at the next poll.
        """
        began = self._mesh.clock.monotonic()
        try:
            words = [
                sys.executable,
                "-m",
                "meshrl.services.weights.versions",
                "copy",
                f"--to={target_url}",
            ]
            logs = Path(self._mesh.settings.run_root) / "mesh" / "logs"
            words += ["--", row.run_dir, *manifests]
            output = await run_for_lines(
                self._mesh.host, words, f"copies/{row.id}", logs, COPY_TIMEOUT_S
            )
            outcomes = parse_outcomes(output[0], manifests, has_exited=output[1])
        except (MeshError, OSError) as error:  # nothing can be copied at the moment
            outcomes = {manifest: error for manifest in manifests}
        took_s = round(self._mesh.clock.monotonic() - began, 3)
        for manifest, outcome in outcomes.items():
            if not isinstance(outcome, dict):
                await self._record_failure(row, target_url, manifest, outcome)
                continue
            copied_manifests.add(manifest)
            self._failures[row.id].pop(manifest, None)
            if outcome:
                self.copied_count += 1
                copied = {"job": row.id, "took_s": took_s} | outcome
                await append_event_with_retry(self._mesh, "version_copied", copied)

    async def _record_failure(
        self, row: jobs.JobRow, target_url: str, manifest: str, error: MeshError | OSError
    ) -> None:
        failures, now = self._failures[row.id], self._mesh.clock.monotonic()
        number = self._records.get_or_create(row.id).versions.get(manifest)
        name = f"{number.lineage}/{number.version}" if number else manifest
        known = {failure.error for failure in failures.values()}
        before = failures.get(manifest)
        again_s = RETRY_S if before is None else min(2 * before.retry_s, MAX_RETRY_S)
        failures[manifest] = _CopyFailure(now + again_s, again_s, name, str(error))
        if str(error) in known:
            return
        log = self._mesh.telemetry.log
        log.error("a version could not be copied", job=row.id, version=name, error=str(error))
        fields = {"job": row.id, "version": name, "manifest": manifest, "error": str(error)}
        fields |= {"url": redact_url(target_url)}
        await append_event_with_retry(self._mesh, "version_copy_failed", fields)


def parse_outcomes(
    lines: Sequence[str], manifests: Sequence[str], has_exited: bool
) -> dict[str, dict[str, Any] | MeshError | OSError]:
    """Parse the output of the copying process into copied fields or an error per version.

    The first version without an outcome caused the exit (`has_exited`) or the timeout. MeshError:
    the process could not start copying.
    """
    found: dict[str, dict[str, Any] | MeshError | OSError] = {}
    last: dict[str, Any] = {}
    for text in lines:
        try:
            fields = json.loads(text)
        except ValueError:
            continue  # other output, of a library
        if not isinstance(fields, dict):
            continue
        last = fields
        if "manifest" in fields:
            error = fields.get("error")
            found[fields["manifest"]] = from_wire(**error) if error else fields["copied"]
    if "manifest" not in last and (error := last.get("error")):
        raise from_wire(**error)
    if untold := [manifest for manifest in manifests if manifest not in found]:
        found[untold[0]] = (
            MeshError(
                f"the copying process has exited: {lines[-1] if lines else 'it printed nothing'}",
                fix="Check whether this host has enough memory; the copy is retried",
            )
            if has_exited
            else DeadlineExceeded(
                f"the version was not copied within {COPY_TIMEOUT_S:g} s",
                fix="Check whether the target is reachable",
            )
        )
    return found
