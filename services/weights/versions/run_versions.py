"""Stored versions of a run, the reasons that keep each, and references to them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import ConfigError, CorruptData, MeshError, NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.json_lines import iterate_rows
from meshrl.common.job.config import INITIAL
from meshrl.common.records.checkpoints import list_manifest_paths, read_best_version, read_manifest
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.manifest import decode_manifest
from meshrl.services.weights.retention.job_records import (
    NO_COMMIT,
    JobRecord,
    read_record,
    record_path,
)
from meshrl.services.weights.retention.pins import VersionPin, compute_chunk_sizes, read_pins
from meshrl.services.weights.retention.policy import VersionNumber, find_requested

CheckpointManifest = tuple[Path, dict[str, Any]]  # the manifest's path and content
COMMIT_EVENTS = ("initial", "step", "lineage", "restored")  # events that name the current version
MIN_DIGEST_DIGITS = 6  # of a manifest's digest in a reference


@dataclass(frozen=True)
class StoredVersion:
    step: int
    manifest_digest: str


def list_versions(run: Path) -> list[StoredVersion]:
    """Return the versions of a run's last lineage in ascending order; most are no longer stored."""
    found: dict[int, str] = {}
    for event in iterate_rows(run / "events.jsonl"):
        fields = event["fields"]
        if event["kind"] in COMMIT_EVENTS and fields.get("manifest"):
            step = int(fields["version"])
            found = {n: digest for n, digest in found.items() if n < step}
            found[step] = fields["manifest"]
    if not found:  # no commit was recorded
        found = {
            checkpoint["step"]: checkpoint["weights"] for _, checkpoint in read_checkpoints(run)
        }
    return [StoredVersion(step, digest) for step, digest in sorted(found.items())]


def read_checkpoints(run: Path) -> list[CheckpointManifest]:
    found = []
    for path in list_manifest_paths(run):
        with suppress(CorruptData, NotFound):
            found.append((path, read_manifest(path)))
    return found


@dataclass(frozen=True)
class VersionSummary:
    lineage: int
    version: int
    manifest: str
    why: list[str]  # what keeps it; empty: it is deleted soon
    bytes: int  # of its chunks
    alone: int  # of chunks that no other version has: freed by its deletion
    dtype: str  # of most of its bytes
    tensors: int
    whole: bool  # True if all of its chunks are stored
    at: float  # last write, seconds since the epoch
    current: bool = False
    base: str = ""  # manifest of its adapters' base version
    note: str = ""  # of its pin

    @property
    def name(self) -> str:
        return f"{self.lineage}/{self.version}"


@dataclass
class RunVersions:
    run_dir: Path
    job: str
    document: dict[str, Any]
    chunks: ChunkStore
    versions: list[VersionSummary] = field(default_factory=list)
    # of the lineage's chain, by version
    committed_manifests: dict[int, str] = field(default_factory=dict)
    best_manifest: str = ""
    pins: dict[str, VersionPin] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path) -> RunVersions:
        job, document = read_job(run)
        found = cls(run, job, document, ChunkStore(run / "store"))
        found.committed_manifests = {one.step: one.manifest_digest for one in list_versions(run)}
        judged = read_best_version(run)
        found.best_manifest = judged.manifest_digest if judged else ""
        own = str(run.resolve())
        every = read_pins(found.chunks.directory, job)
        found.pins = {manifest: pin for manifest, pin in every.items() if pin.run in (own, "")}
        found.versions = _list_versions(found, _read_record(found))
        return found

    def resolve(self, reference: str) -> VersionSummary:
        """Return the version of a reference: a number, LINEAGE/NUMBER, `last`, `best` or manifest
        digits.

        Raises:
            ConfigError: The reference is invalid or ambiguous.
            NotFound: The run does not have that version. Both errors list the available ones.
        """
        found = self._find_matches(reference.strip())
        if not found:
            raise NotFound(
                f"{self.run_dir} does not have version {reference}", fix=self._describe_available()
            )
        if len(found) > 1:
            raise ConfigError(
                f"{reference} is ambiguous: it matches {len(found)} versions of {self.run_dir}",
                fix="Use one of " + ", ".join(f"{one.name} ({one.manifest})" for one in found),
            )
        return found[0]

    def _find_matches(self, reference: str) -> list[VersionSummary]:
        if exact_matches := [one for one in self.versions if one.manifest == reference]:
            return exact_matches
        if reference == "last":
            return [one for one in self.versions if one.current]
        if reference == "best":
            if not self.best_manifest:
                raise NotFound(
                    f"{self.run_dir} has no best version",
                    fix="Set evaluation.best to the figure that ranks versions",
                )
            return [one for one in self.versions if one.manifest == self.best_manifest]
        *lineage, number = reference.split("/")
        if len(lineage) < 2 and all(part.isdecimal() for part in (*lineage, number)):
            same = [one for one in self.versions if one.version == int(number)]
            same = [one for one in same if not lineage or one.lineage == int(lineage[0])]
            return [
                one for one in same if one.manifest == self.committed_manifests.get(int(number))
            ] or same
        if len(reference) >= MIN_DIGEST_DIGITS and set(reference) <= set("0123456789abcdef"):
            return [one for one in self.versions if one.manifest.startswith(reference)]
        raise ConfigError(
            f"{reference!r:.60} does not name a version",
            fix="Use a number such as 12, LINEAGE/NUMBER, last, best, or the first "
            f"{MIN_DIGEST_DIGITS} or more digits of a manifest. {self._describe_available()}",
        )

    def list_permanent(self) -> list[VersionSummary]:
        """Return the permanent versions and the last one."""
        lasting = {"current", "best", "pinned", "weights.keep_every"}
        return [one for one in self.versions if lasting & set(one.why)]

    def _describe_available(self) -> str:
        if not self.versions:
            return "The run has none: it ended before version 0"
        numbers = Counter(one.version for one in self.versions)
        names = (str(o.version) if numbers[o.version] == 1 else o.name for o in self.versions)
        return "Choose one of " + ", ".join(dict.fromkeys(names))


def read_job(run: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and document of a run's job. NotFound: no run. CorruptData: a corrupt
    file.
    """
    path = run / "job.json"
    try:
        content = documents.decode(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"there is no run in {run}: it has no job.json",
            fix="Name a run directory, such as one below runs/",
        ) from None
    job, document = content.get("job"), content.get("document")
    if not isinstance(job, str) or not isinstance(document, dict):
        raise CorruptData("the file lacks the name or the document of the job", where=str(path))
    return job, document


def _read_record(run: RunVersions) -> JobRecord:
    """Return the store's record of the run; an empty one if it is corrupt or another run's."""
    try:
        record = read_record(record_path(run.chunks.directory, run.job))
    except (CorruptData, NotFound):
        return JobRecord(run.job)
    own = record.run_dir in ("", str(run.run_dir), str(run.run_dir.resolve()))
    return record if own else JobRecord(run.job)


def _list_versions(run: RunVersions, record: JobRecord) -> list[VersionSummary]:
    named = {checkpoint["weights"] for _, checkpoint in read_checkpoints(run.run_dir)}
    manifests: dict[str, Manifest] = {}
    for digest in {
        *record.versions,
        *run.pins,
        *named,
        *run.committed_manifests.values(),
        run.best_manifest,
    } - {""}:
        path = run.chunks.chunk_path(digest)  # Refused for a run of an earlier format
        with suppress(MeshError):  # it was deleted or is corrupt: leave it out
            manifests[digest] = decode_manifest(run.chunks.read(digest), str(path))
    numbers = {d: VersionNumber(one.lineage, one.version) for d, one in manifests.items()}
    last = (
        run.committed_manifests[max(run.committed_manifests)]
        if run.committed_manifests
        else record.newest_manifest
    )
    current = numbers.get(last, record.newest if record.newest_manifest else NO_COMMIT)
    requested = find_requested(numbers, current, run.document.get("weights", {}))
    bases = {one.base.manifest for one in manifests.values() if one.base}
    reference = run.document.get("models", {}).get("reference", {}).get("path")
    users = Counter(chunk for one in manifests.values() for chunk in compute_chunk_sizes([one]))

    def why(digest: str) -> list[str]:
        reasons = {
            "current": digest == last,
            "staged": numbers[digest] > current,
            "best": digest == run.best_manifest,
            "pinned": digest in run.pins,
            "base": digest in bases,  # some adapters have it as base
            "anchor": digest in record.anchors,  # hosts with older versions get deltas from it
            "checkpoint": digest in named,
            "reference": reference == INITIAL and manifests[digest].version == 0,
            f"weights.{requested.get(digest)}": digest in requested and digest != last,
        }
        return [reason for reason, holds in reasons.items() if holds]

    ordered = sorted(manifests, key=lambda digest: (numbers[digest], digest))
    return [
        _summarize(run, digest, manifests[digest], why(digest), users, digest == last)
        for digest in ordered
    ]


def _summarize(
    run: RunVersions,
    digest: str,
    manifest: Manifest,
    reasons: list[str],
    users: Counter[str],
    is_current: bool,
) -> VersionSummary:
    chunks, kinds = compute_chunk_sizes([manifest]), Counter[str]()
    base = manifest.base.manifest if manifest.base else ""
    for piece in manifest.tensors:
        kinds[piece.dtype] += piece.size_bytes
    return VersionSummary(
        manifest.lineage,
        manifest.version,
        digest,
        reasons,
        bytes=sum(chunks.values()),
        alone=sum(size for chunk, size in chunks.items() if users[chunk] == 1),
        dtype=kinds.most_common(1)[0][0] if kinds else "",
        tensors=len({piece.name for piece in manifest.tensors}),
        whole=all(map(run.chunks.has, [*chunks, base] if base else chunks)),
        at=run.chunks.read_write_times([digest]).get(digest, 0) / 1e9,
        current=is_current,
        base=base,
        note=run.pins[digest].note if digest in run.pins else "",
    )
