"""Export of a version as a Hugging Face directory to a path or URL."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from meshrl.common.base.errors import CorruptData, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.remote_directory import RemoteDirectory, is_url, redact_url
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.records.checkpoints import list_files
from meshrl.services.weights import export
from meshrl.services.weights.atomic_directories import EXPORT_MARKER, scratch_directory
from meshrl.services.weights.versions.run_versions import RunVersions, StoredVersion, VersionSummary

COPIES_KEY = "weights.copies"
NAME_DIGITS = 8  # of a manifest's digest, in the name of a directory
SCRATCH_PREFIX = ".to-url"  # below a run's `exports`: files on their way to a URL
UNFINISHED_MARKER = (
    "meshrl.begun.json"  # at a URL: the version of the files there, until all are uploaded
)
# No loader opens a model without these files: they are removed first and uploaded last.
CONFIG_FILES = ("config.json", "adapter_config.json")


def export_to(
    run: RunVersions, version: VersionSummary, target: str, setting: str = "--out"
) -> int:
    """Write a version to a directory or URL, and return the bytes of its files.

    A directory is complete or absent. At a URL the marker `meshrl.json` is written last, and an
    interrupted export is continued.

    Args:
        setting: Setting that named the target.
    Raises:
        Refused: The target has other files.
        ConfigError: The kind of URL is unknown.
    """
    stored_version = StoredVersion(version.version, version.manifest)
    if not is_url(target):
        export.export_version(run.run_dir, stored_version, Path(target))
        return sum(_read_file_sizes(Path(target)).values())
    there = RemoteDirectory(target, setting, "the target of the copy", writer_id=version.manifest)
    exports = run.run_dir / "exports"
    for leftover in exports.glob(f"{SCRATCH_PREFIX}-*"):  # left by killed exports to URLs
        with suppress(Refused, OSError), scratch_directory(leftover):  # unless it is in progress
            pass
    if _read_document(there, EXPORT_MARKER).get("manifest") == version.manifest:
        there.remove(UNFINISHED_MARKER)
        return 0
    own = setting == COPIES_KEY
    _check_target(there, is_owned=own)
    place = hashlib.sha256(target.encode()).hexdigest()[:NAME_DIGITS]
    with scratch_directory(
        exports / f"{SCRATCH_PREFIX}-{version.manifest[:NAME_DIGITS]}-{place}"
    ) as scratch:
        data = JobData.from_document(run.job, run.document, str(run.run_dir))
        export.write_export(data, stored_version, scratch, scratch)
        _upload_files(scratch, there, _prepare_target(there, version.manifest, is_owned=own))
        return sum(_read_file_sizes(scratch).values())


def _check_target(remote: RemoteDirectory, *, is_owned: bool) -> dict[str, int]:
    """Return the sizes of the target's files. Refused: no export wrote them, and it is not
    `is_owned`.
    """
    have = remote.list_file_sizes()
    if have and not is_owned and EXPORT_MARKER not in have and UNFINISHED_MARKER not in have:
        raise Refused(
            f"{remote.public_url} is not the directory of an export: it has no {EXPORT_MARKER}",
            fix="Name a new folder in --out, or move its files away",
        )
    return have


def _prepare_target(remote: RemoteDirectory, manifest: str, *, is_owned: bool) -> dict[str, int]:
    """Remove all files except those of an interrupted export of this version; return their
    sizes.
    """
    have = _check_target(remote, is_owned=is_owned)
    if (
        EXPORT_MARKER not in have
        and _read_document(remote, UNFINISHED_MARKER).get("manifest") == manifest
    ):
        return {name: size for name, size in have.items() if name != UNFINISHED_MARKER}
    # an interruption from here on must not continue the old files
    remote.write_file(UNFINISHED_MARKER, b"{}")
    for name in sorted(
        have, key=lambda name: (name != EXPORT_MARKER, not _is_config_file(name), name)
    ):
        if name != UNFINISHED_MARKER:
            remote.remove(name)
    remote.write_file(UNFINISHED_MARKER, json.dumps({"manifest": manifest}).encode())
    return {}


def copy_version(run: RunVersions, version: VersionSummary, base_url: str) -> dict[str, Any]:
    """Copy a version to its own directory below `base_url`, unless it is there.

    Returns:
        Fields of the event; empty if the copy existed.
    """
    digits = version.manifest[:NAME_DIGITS]
    name = f"{quote(run.job, safe='')}/{version.lineage}-{version.version}-{digits}"
    out = f"{base_url.rstrip('/')}/{name}"
    there = RemoteDirectory(out, COPIES_KEY, "the target of the copy")
    if _read_document(there, EXPORT_MARKER).get("manifest") == version.manifest:
        return {}
    size = export_to(run, version, out, COPIES_KEY)
    fields = {"lineage": version.lineage, "version": version.version, "manifest": version.manifest}
    return fields | {"url": redact_url(out), "bytes": size}


def _read_document(remote: RemoteDirectory, name: str) -> dict[str, object]:
    try:
        return documents.decode(remote.read_file(name), remote.public_url)
    except (NotFound, CorruptData):
        return {}


def _upload_files(directory: Path, remote: RemoteDirectory, existing_sizes: dict[str, int]) -> None:
    """Upload missing files, the configuration after the weights, and the marker last."""
    sizes = _read_file_sizes(directory)
    del sizes[EXPORT_MARKER]
    for name in existing_sizes.keys() - sizes.keys():
        remote.remove(name)
    for name in sorted(sizes, key=lambda name: (_is_config_file(name), name)):
        if existing_sizes.get(name) != sizes[name]:
            remote.upload_file(name, directory / name)
    remote.upload_file(EXPORT_MARKER, directory / EXPORT_MARKER)
    remote.remove(UNFINISHED_MARKER)


def _is_config_file(name: str) -> bool:
    return PurePosixPath(name).name in CONFIG_FILES


def _read_file_sizes(directory: Path) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in list_files(directory)}
