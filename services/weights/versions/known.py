"""Which versions the store has of a run, what keeps each, and which one a person means."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.api.weights import Manifest
from common.base.errors import ConfigError, Damaged, MeshError, NotFound
from common.base.files import documents
from common.job.config import INITIAL
from common.records.checkpoints import best
from common.weights.chunks.chunks import ChunkStore
from common.weights.layout.manifest import unpacked
from services.weights.committed import checkpoints, versions
from services.weights.keeping.pins import Pin, pins, sizes
from services.weights.keeping.records import NO_COMMIT, JobVersions, record_in, record_path
from services.weights.keeping.retention import Number, lasting

LEAST_DIGITS = 6  # of a manifest's digest, by which one may be named


@dataclass(frozen=True)
class KnownVersions:
    """A version that the store has."""

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
    def number(self) -> Number:
        return Number(self.lineage, self.version)

    @property
    def name(self) -> str:
        return f"{self.lineage}/{self.version}"


@dataclass
class RunVersions:
    """All of a run, the oldest first."""

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
        """NotFound without a run, Damaged when its `job.json` is."""
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
        return self._one_of(self._called(word.strip()), word)

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
        if word.isdecimal():
            same = [one for one in self.versions if one.version == int(word)]
            led = [one for one in same if one.manifest == self.committed.get(int(word))]
            return led or same
        lineage, slash, number = word.partition("/")
        if slash and lineage.isdecimal() and number.isdecimal():
            asked = Number(int(lineage), int(number))
            same = [one for one in self.versions if one.number == asked]
            led = [one for one in same if one.manifest == self.committed.get(asked.version)]
            return led or same
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

    def _one_of(self, found: list[KnownVersions], word: str) -> KnownVersions:
        if not found:
            raise NotFound(f"{self.run} does not hold version {word}", fix=self._there())
        if len(found) > 1:
            raise ConfigError(
                f"{word} means {len(found)} versions of {self.run}",
                fix="Take one of " + ", ".join(f"{one.name} ({one.manifest})" for one in found),
            )
        return found[0]

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
    named = {held["weights"]: path.stem for path, held in checkpoints(run.run)}
    digests = {*record.versions, *run.pins, *named, *run.committed.values(), run.best} - {""}
    manifests = {digest: one for digest in digests if (one := _manifest(run.chunks, digest))}
    numbers = {d: Number(one.lineage, one.version) for d, one in manifests.items()}
    last = run.committed[max(run.committed)] if run.committed else record.newest_manifest
    current = numbers.get(last, record.newest if record.newest_manifest else NO_COMMIT)
    asked = lasting(numbers, current, run.document.get("weights", {}))
    bases = {base for one in manifests.values() for base in _base(one)}
    reasons = _Reasons(run, named, asked, bases, record.anchors, last, current)
    users = Counter(chunk for one in manifests.values() for chunk in sizes([one]))
    ordered = sorted(manifests, key=lambda digest: (numbers[digest], digest))
    return [_described(run, d, manifests[d], reasons, users) for d in ordered]


@dataclass(frozen=True)
class _Reasons:
    """Why versions stay."""

    run: RunVersions
    checkpoints: dict[str, str]  # names by manifest
    asked: dict[str, str]
    bases: set[str]  # that adapters among the versions are added to
    anchors: frozenset[str]  # that hosts behind the others get deltas from
    last: str
    current: Number

    def of(self, digest: str, manifest: Manifest) -> list[str]:
        found = ["current"] if digest == self.last else []
        if Number(manifest.lineage, manifest.version) > self.current:
            found.append("staged")
        if digest == self.run.best:
            found.append("best")
        if digest in self.run.pins:
            found.append("pinned")
        if digest in self.bases:
            found.append("base")
        if digest in self.anchors:
            found.append("anchor")
        if digest in self.checkpoints:
            found.append("checkpoint")
        reference = self.run.document.get("models", {}).get("reference", {}).get("path")
        if reference == INITIAL and manifest.version == 0:
            found.append("reference")
        if digest in self.asked and digest != self.last:
            found.append(f"weights.{self.asked[digest]}")
        return found


def _described(
    run: RunVersions, digest: str, manifest: Manifest, reasons: _Reasons, users: Counter[str]
) -> KnownVersions:
    chunks = sizes([manifest])
    kinds = Counter[str]()
    for piece in manifest.tensors:
        kinds[piece.dtype] += piece.size
    return KnownVersions(
        manifest.lineage,
        manifest.version,
        digest,
        reasons.of(digest, manifest),
        sum(chunks.values()),
        sum(size for chunk, size in chunks.items() if users[chunk] == 1),
        kinds.most_common(1)[0][0] if kinds else "",
        len({piece.name for piece in manifest.tensors}),
        all(run.chunks.has(needed) for needed in (*chunks, *_base(manifest))),
        run.chunks.written([digest]).get(digest, 0) / 1e9,
        digest == reasons.last,
        "".join(_base(manifest)),
        run.pins[digest].note if digest in run.pins else "",
    )


def _base(manifest: Manifest) -> list[str]:
    """The manifest of what its adapters are added to, if it has none but these."""
    return [manifest.base.digest] if manifest.base else []


def _manifest(chunks: ChunkStore, digest: str) -> Manifest | None:
    path = chunks.path(digest)  # Refused for a run of an earlier version
    try:
        return unpacked(chunks.read(digest), str(path))
    except MeshError:  # it has gone, or is damaged: it is no version to speak of
        return None
