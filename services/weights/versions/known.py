"""Which versions the store has of a run, what keeps each, and which one a person means."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.api.weights import Manifest
from meshrl.common.base.errors import ConfigError, Damaged, MeshError, NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.lines import whole
from meshrl.common.job.config import INITIAL
from meshrl.common.records.checkpoints import all_checkpoints, best, manifest_of
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.layout.manifest import unpacked
from meshrl.services.weights.keeping.pins import Pin, pins, sizes
from meshrl.services.weights.keeping.records import NO_COMMIT, JobVersions, record_in, record_path
from meshrl.services.weights.keeping.retention import Number, lasting

Checkpoint = tuple[Path, dict[str, Any]]  # the path of its manifest, and what that holds
COMMITS = ("initial", "step", "lineage", "restored")  # events that name the current version
LEAST_DIGITS = 6  # of a manifest's digest, by which one may be named


@dataclass(frozen=True)
class StoredVersion:
    step: int
    manifest: str  # digest


def versions(run: Path) -> list[StoredVersion]:
    """The versions of the lineage that a run ended in, or is in, ascending; most are no longer
    stored.
    """
    found: dict[int, str] = {}
    for event in whole(run / "events.jsonl"):
        fields = event["fields"]
        if event["kind"] in COMMITS and fields.get("manifest"):
            step = int(fields["version"])
            found = {n: digest for n, digest in found.items() if n < step}
            found[step] = fields["manifest"]
    if not found:  # nothing was recorded
        found = {held["step"]: held["weights"] for _, held in checkpoints(run)}
    return [StoredVersion(step, digest) for step, digest in sorted(found.items())]


def checkpoints(run: Path) -> list[Checkpoint]:
    found = []
    for path in all_checkpoints(run):
        with suppress(Damaged, NotFound):
            found.append((path, manifest_of(path)))
    return found


@dataclass(frozen=True)
class KnownVersions:
    lineage: int
    version: int
    manifest: str
    why: list[str]  # what keeps it; none: it goes soon
    bytes: int  # of its chunks
    alone: int  # of those that no other version has: what its end makes room for
    dtype: str  # that most of its bytes have
    tensors: int
    whole: bool  # whether all of its chunks are there
    at: float  # when it was written last, seconds of the epoch
    current: bool = False
    base: str = ""  # manifest of the version that its adapters are added to
    note: str = ""  # of its pin

    @property
    def name(self) -> str:
        return f"{self.lineage}/{self.version}"


@dataclass
class RunVersions:
    run: Path
    job: str
    document: dict[str, Any]
    chunks: ChunkStore
    versions: list[KnownVersions] = field(default_factory=list)
    committed: dict[int, str] = field(default_factory=dict)  # manifests of the chain, by number
    best: str = ""  # manifest
    pins: dict[str, Pin] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Path) -> RunVersions:
        job, document = described(run)
        found = cls(run, job, document, ChunkStore(run / "store"))
        found.committed = {one.step: one.manifest for one in versions(run)}
        judged = best(run)
        found.best = judged.manifest if judged else ""
        own = str(run.resolve())
        every = pins(found.chunks.directory, job)
        found.pins = {manifest: pin for manifest, pin in every.items() if pin.run in (own, "")}
        found.versions = _known(found, _record(found))
        return found

    def meant(self, word: str) -> KnownVersions:
        """The version that a person calls so: a number, LINEAGE/NUMBER, `last`, `best`, or the
        first digits of its manifest. ConfigError for what is no name of one, NotFound for one that
        is not there; both say which there are.
        """
        found = self._called(word.strip())
        if not found:
            raise NotFound(f"{self.run} does not hold version {word}", fix=self._there())
        if len(found) > 1:
            raise ConfigError(
                f"{word} means {len(found)} versions of {self.run}",
                fix="Take one of " + ", ".join(f"{one.name} ({one.manifest})" for one in found),
            )
        return found[0]

    def _called(self, word: str) -> list[KnownVersions]:
        if whole := [one for one in self.versions if one.manifest == word]:
            return whole
        if word == "last":
            return [one for one in self.versions if one.current]
        if word == "best":
            if not self.best:
                raise NotFound(
                    f"{self.run} has no best version",
                    fix="Name the figure to judge by in evaluation.best",
                )
            return [one for one in self.versions if one.manifest == self.best]
        *lineage, number = word.split("/")
        if len(lineage) < 2 and all(part.isdecimal() for part in (*lineage, number)):
            same = [one for one in self.versions if one.version == int(number)]
            same = [one for one in same if not lineage or one.lineage == int(lineage[0])]
            return [one for one in same if one.manifest == self.committed.get(int(number))] or same
        if len(word) >= LEAST_DIGITS and set(word) <= set("0123456789abcdef"):
            return [one for one in self.versions if one.manifest.startswith(word)]
        raise ConfigError(
            f"{word!r:.60} names no version",
            fix="Take a number, as 12, LINEAGE/NUMBER, last, best, or the first "
            f"{LEAST_DIGITS} or more digits of a manifest. {self._there()}",
        )

    def for_good(self) -> list[KnownVersions]:
        """Those that stay for good, and the last one."""
        lasting = {"current", "best", "pinned", "weights.keep_every"}
        return [one for one in self.versions if lasting & set(one.why)]

    def _there(self) -> str:
        if not self.versions:
            return "It holds none: the run ended before version 0"
        numbers = Counter(one.version for one in self.versions)
        names = (str(o.version) if numbers[o.version] == 1 else o.name for o in self.versions)
        return "It holds " + ", ".join(dict.fromkeys(names))


def described(run: Path) -> tuple[str, dict[str, Any]]:
    """The name and document of a run's job; NotFound without a run, Damaged."""
    path = run / "job.json"
    try:
        held = documents.decode(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"there is no run in {run}: it has no job.json", fix="Name a directory as under runs/"
        ) from None
    job, document = held.get("job"), held.get("document")
    if not isinstance(job, str) or not isinstance(document, dict):
        raise Damaged("it names no job, or not what the job is", where=str(path))
    return job, document


def _record(run: RunVersions) -> JobVersions:
    """What the store has on record of the run; nothing, where that is damaged, or another's."""
    try:
        record = record_in(record_path(run.chunks.directory, run.job))
    except (Damaged, NotFound):
        return JobVersions(run.job)
    own = record.run_dir in ("", str(run.run), str(run.run.resolve()))
    return record if own else JobVersions(run.job)


def _known(run: RunVersions, record: JobVersions) -> list[KnownVersions]:
    named = {held["weights"] for _, held in checkpoints(run.run)}
    manifests: dict[str, Manifest] = {}
    for digest in {*record.versions, *run.pins, *named, *run.committed.values(), run.best} - {""}:
        path = run.chunks.path(digest)  # Refused for a run of an earlier version
        with suppress(MeshError):  # it has gone, or is damaged: it is no version to speak of
            manifests[digest] = unpacked(run.chunks.read(digest), str(path))
    numbers = {d: Number(one.lineage, one.version) for d, one in manifests.items()}
    last = run.committed[max(run.committed)] if run.committed else record.newest_manifest
    current = numbers.get(last, record.newest if record.newest_manifest else NO_COMMIT)
    asked = lasting(numbers, current, run.document.get("weights", {}))
    bases = {one.base.digest for one in manifests.values() if one.base}
    reference = run.document.get("models", {}).get("reference", {}).get("path")
    users = Counter(chunk for one in manifests.values() for chunk in sizes([one]))

    def why(digest: str) -> list[str]:
        reasons = {
            "current": digest == last,
            "staged": numbers[digest] > current,
            "best": digest == run.best,
            "pinned": digest in run.pins,
            "base": digest in bases,  # adapters among the versions are added to it
            "anchor": digest in record.anchors,  # hosts behind the others get deltas from it
            "checkpoint": digest in named,
            "reference": reference == INITIAL and manifests[digest].version == 0,
            f"weights.{asked.get(digest)}": digest in asked and digest != last,
        }
        return [reason for reason, holds in reasons.items() if holds]

    ordered = sorted(manifests, key=lambda digest: (numbers[digest], digest))
    return [
        _described(run, digest, manifests[digest], why(digest), users, digest == last)
        for digest in ordered
    ]


def _described(
    run: RunVersions,
    digest: str,
    manifest: Manifest,
    why: list[str],
    users: Counter[str],
    current: bool,
) -> KnownVersions:
    chunks, kinds = sizes([manifest]), Counter[str]()
    base = manifest.base.digest if manifest.base else ""
    for piece in manifest.tensors:
        kinds[piece.dtype] += piece.size
    return KnownVersions(
        manifest.lineage,
        manifest.version,
        digest,
        why,
        bytes=sum(chunks.values()),
        alone=sum(size for chunk, size in chunks.items() if users[chunk] == 1),
        dtype=kinds.most_common(1)[0][0] if kinds else "",
        tensors=len({piece.name for piece in manifest.tensors}),
        whole=all(map(run.chunks.has, [*chunks, base] if base else chunks)),
        at=run.chunks.written([digest]).get(digest, 0) / 1e9,
        current=current,
        base=base,
        note=run.pins[digest].note if digest in run.pins else "",
    )
