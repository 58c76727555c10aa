"""Writes a version as a Hugging Face directory, also at a URL."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from meshrl.common.base.errors import Damaged, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.at_url import AtUrl, is_url, without_secrets
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.records.checkpoints import files_below
from meshrl.services.weights import export
from meshrl.services.weights.making import MARKER, making
from meshrl.services.weights.versions.known import KnownVersions, RunVersions, StoredVersion

COPIES = "weights.copies"
DIGITS = 8  # of a manifest, in the name of a directory
SCRATCH = ".to-url"  # below a run's `exports`: what is on its way to a URL
BEGUN = "meshrl.begun.json"  # at a URL: of which version the files there are, until all are
# Without these nobody opens what lies there: they go first, and come last.
OPENED_BY = ("config.json", "adapter_config.json")


def to(run: RunVersions, version: KnownVersions, out: str, key: str = "--out") -> int:
    """Writes a version to a directory, where it is whole or not there, or to a URL, where the
    marker `meshrl.json` comes last; the bytes of its files. `key`: what named the place.

    Refused when something else lies there, ConfigError for a URL of no known kind. What an export
    to a URL that was cut off has left is gone on with.
    """
    asked = StoredVersion(version.version, version.manifest)
    if not is_url(out):
        export.write_one(run.run, asked, Path(out))
        return sum(_sizes(Path(out)).values())
    there = AtUrl(out, key, "the place of the copy", writer=version.manifest)
    exports = run.run / "exports"
    for left in exports.glob(f"{SCRATCH}-*"):  # by exports to URLs that were killed
        with suppress(Refused, OSError), making(left):  # unless it goes on
            pass
    if _told(there, MARKER).get("manifest") == version.manifest:
        there.discard(BEGUN)
        return 0
    own = key == COPIES
    _checked(there, own=own)
    place = hashlib.sha256(out.encode()).hexdigest()[:DIGITS]
    with making(exports / f"{SCRATCH}-{version.manifest[:DIGITS]}-{place}") as made:
        data = JobData.of(run.job, run.document, str(run.run))
        export.fill(data, asked, made, made)
        _put(made, there, _begun(there, version.manifest, own=own))
        return sum(_sizes(made).values())


def _checked(there: AtUrl, *, own: bool) -> dict[str, int]:
    """The sizes of the files there. Refused when they are no export's, unless the place is MeshRL's
    `own`.
    """
    have = there.sizes()
    if have and not own and MARKER not in have and BEGUN not in have:
        raise Refused(
            f"{there.shown} was not written by an export: it has no {MARKER}",
            fix="Name a folder of its own in --out, or move away what lies there",
        )
    return have


def _begun(there: AtUrl, manifest: str, *, own: bool) -> dict[str, int]:
    """The sizes of the files of that version which an export has left there that was cut off; all
    else goes.
    """
    have = _checked(there, own=own)
    if MARKER not in have and _told(there, BEGUN).get("manifest") == manifest:
        return {name: size for name, size in have.items() if name != BEGUN}
    there.place_content(BEGUN, b"{}")  # what is there goes, which a cut is to know
    for name in sorted(have, key=lambda name: (name != MARKER, not _opens(name), name)):
        if name != BEGUN:
            there.discard(name)
    there.place_content(BEGUN, json.dumps({"manifest": manifest}).encode())
    return {}


def copy(run: RunVersions, version: KnownVersions, place: str) -> dict[str, Any]:
    """Copies a version to a directory of its own below `place`, unless it is there; what is told
    of it, empty if it was.
    """
    digits = version.manifest[:DIGITS]
    name = f"{quote(run.job, safe='')}/{version.lineage}-{version.version}-{digits}"
    out = f"{place.rstrip('/')}/{name}"
    there = AtUrl(out, COPIES, "the place of the copy")
    if _told(there, MARKER).get("manifest") == version.manifest:
        return {}
    size = to(run, version, out, COPIES)
    told = {"lineage": version.lineage, "version": version.version, "manifest": version.manifest}
    return told | {"url": without_secrets(out), "bytes": size}


def _told(there: AtUrl, name: str) -> dict[str, object]:
    try:
        return documents.decode(there.content(name), there.shown)
    except (NotFound, Damaged):
        return {}


def _put(directory: Path, there: AtUrl, have: dict[str, int]) -> None:
    """Copies the files that are not there yet, those that a model is opened by after the others,
    and the marker last.
    """
    sizes = _sizes(directory)
    del sizes[MARKER]
    for name in have.keys() - sizes.keys():
        there.discard(name)
    for name in sorted(sizes, key=lambda name: (_opens(name), name)):
        if have.get(name) != sizes[name]:
            there.place_file(name, directory / name)
    there.place_file(MARKER, directory / MARKER)
    there.discard(BEGUN)


def _opens(name: str) -> bool:
    return PurePosixPath(name).name in OPENED_BY


def _sizes(directory: Path) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in files_below(directory)}
