"""Copies versions that stay for good to the place that their job names (`weights.copies`): each as
a Hugging Face directory, by a process of its own, while nothing waits for it.

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
from meshrl.common.base.files.at_url import without_secrets
from meshrl.common.mesh.process.answers import said_by
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.services.weights.copying import patiently_tell
from meshrl.services.weights.keeping.pins import pins
from meshrl.services.weights.keeping.records import IO_S, JobRecords
from meshrl.services.weights.keeping.retention import Number, lasting

LOOK_S = 2.0  # between two looks at what is to be there
AGAIN_S = 5.0  # after an error; twice as long after each further one
LATEST_AGAIN_S = 60.0
COPY_S = 6 * 3600.0  # of what a look has found: versions may have hundreds of GB, and links be slow
SHOWN = 3  # troubles of a job that are told


@dataclass
class _Trouble:
    due: float  # when it is tried again, by the monotonic clock
    again_s: float
    name: str  # of the version
    error: str


class VersionCopies:
    def __init__(
        self, mesh: Mesh, records: JobRecords, store: Path, look_s: float = LOOK_S
    ) -> None:
        self._mesh, self._records, self._store, self._look_s = mesh, records, store, look_s
        self._there: dict[tuple[str, str], set[str]] = {}  # manifests by run directory and place
        self._troubles: dict[str, dict[str, _Trouble]] = {}  # by job and manifest
        self.copied = 0

    def stats(self) -> dict[str, Any]:
        told = []
        for job, troubles in sorted(self._troubles.items()):
            whys = [f"version {trouble.name}: {trouble.error}" for trouble in troubles.values()]
            more = [f"and {len(whys) - SHOWN} more"] if len(whys) > SHOWN else []
            told += [f"{job}: {', '.join([*whys[:SHOWN], *more])}"] if whys else []
        return {"versions_copied": self.copied, "copies_trouble": "; ".join(told)}

    async def forever(self) -> None:
        while True:
            await self._mesh.clock.sleep(self._look_s)
            try:
                rows = await jobs.jobs(self._mesh.state)
            except StateUnavailable:
                continue  # nobody commits anything meanwhile
            for row in rows:
                await self._look(row)
            self._troubles = {row.id: self._troubles.get(row.id, {}) for row in rows}

    async def _look(self, row: jobs.JobRow) -> None:
        place = row.document.get("weights", {}).get("copies", "")
        troubles = self._troubles.setdefault(row.id, {})
        if not place:
            troubles.clear()
            return
        there = self._there.setdefault((row.run_dir, place), set())
        try:
            run = self._mesh.host.run_blocking
            pinned = await run(pins, self._store, row.id, deadline_s=IO_S)
        except StateUnavailable:
            return
        except (MeshError, OSError) as error:
            self._mesh.telemetry.log.warning("copies", job=row.id, error=str(error))
            return
        current, asked = Number(row.lineage, row.version), row.document["weights"]
        kept = lasting(self._records.of(row.id).versions, current, asked)
        # What nothing but a person or a better one ends, and the last one of a job that is over.
        lacking = {manifest for manifest, key in kept.items() if key == "keep_every"}
        lacking |= {manifest for manifest, pin in pinned.items() if pin.run == row.run_dir}
        lacking |= {row.best_manifest} | ({row.manifest} if row.ended else set())
        lacking -= there | {""}
        for manifest in troubles.keys() - lacking:
            del troubles[manifest]  # it is to go
        now = self._mesh.clock.monotonic()
        due = {m for m in lacking if m not in troubles or now >= troubles[m].due}
        if due:
            # Those that have failed come last: one that ends its process delays no other.
            await self._copy(row, place, sorted(due, key=lambda m: (m in troubles, m)), there)

    async def _copy(
        self, row: jobs.JobRow, place: str, manifests: list[str], there: set[str]
    ) -> None:
        """Has versions copied; what hinders one keeps no other from it. Those of which nothing was
        told, because their process ended with one before them, are due at the next look.
        """
        began = self._mesh.clock.monotonic()
        try:
            words = [
                sys.executable,
                "-m",
                "meshrl.services.weights.versions",
                "copy",
                f"--to={place}",
            ]
            logs = Path(self._mesh.settings.run_root) / "mesh" / "logs"
            words += ["--", row.run_dir, *manifests]
            said = await said_by(self._mesh.host, words, f"copies/{row.id}", logs, COPY_S)
            told = outcomes(said[0], manifests, ended=said[1])
        except (MeshError, OSError) as error:  # nothing can be copied at the moment
            told = {manifest: error for manifest in manifests}
        took_s = round(self._mesh.clock.monotonic() - began, 3)
        for manifest, outcome in told.items():
            if not isinstance(outcome, dict):
                await self._failed(row, place, manifest, outcome)
                continue
            there.add(manifest)
            self._troubles[row.id].pop(manifest, None)
            if outcome:
                self.copied += 1
                copied = {"job": row.id, "took_s": took_s} | outcome
                await patiently_tell(self._mesh, "version_copied", copied)

    async def _failed(
        self, row: jobs.JobRow, place: str, manifest: str, error: MeshError | OSError
    ) -> None:
        troubles, now = self._troubles[row.id], self._mesh.clock.monotonic()
        number = self._records.of(row.id).versions.get(manifest)
        name = f"{number.lineage}/{number.version}" if number else manifest
        known = {trouble.error for trouble in troubles.values()}
        before = troubles.get(manifest)
        again_s = AGAIN_S if before is None else min(2 * before.again_s, LATEST_AGAIN_S)
        troubles[manifest] = _Trouble(now + again_s, again_s, name, str(error))
        if str(error) in known:
            return
        log = self._mesh.telemetry.log
        log.error("a version is not copied", job=row.id, version=name, error=str(error))
        told = {"job": row.id, "version": name, "manifest": manifest, "error": str(error)}
        told |= {"url": without_secrets(place)}
        await patiently_tell(self._mesh, "version_copy_failed", told)


def outcomes(
    said: Sequence[str], manifests: Sequence[str], ended: bool
) -> dict[str, dict[str, Any] | MeshError | OSError]:
    """What was told of each version, by the lines of the process that copied them: what was copied,
    or why it was not. One that has not told of all was at the first of the others, which is why it
    `ended`, or took too long. MeshError when it could not look at any.
    """
    found: dict[str, dict[str, Any] | MeshError | OSError] = {}
    last: dict[str, Any] = {}
    for text in said:
        try:
            told = json.loads(text)
        except ValueError:
            continue  # a library has said something
        if not isinstance(told, dict):
            continue
        last = told
        if "manifest" in told:
            error = told.get("error")
            found[told["manifest"]] = from_wire(**error) if error else told["copied"]
    if "manifest" not in last and (error := last.get("error")):
        raise from_wire(**error)
    if untold := [manifest for manifest in manifests if manifest not in found]:
        found[untold[0]] = (
            MeshError(
                f"the process that copies has ended: {said[-1] if said else 'without a word'}",
                fix="It is tried again; see whether this host's memory is enough",
            )
            if ended
            else DeadlineExceeded(
                f"it was not copied within {COPY_S:g} s", fix="See whether the place answers"
            )
        )
    return found
