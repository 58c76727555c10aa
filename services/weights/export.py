"""Export of a run's version as a Hugging Face directory, from the run's files alone.

`python -m meshrl.services.weights.export --run RUN --out DIR [--step N | --best]`; without either,
the last committed version. `--below DIR` in place of `--out` gives each version a directory of its
own in DIR, writes it unless it exists, and prints its path last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from meshrl.common.base.errors import CorruptData, MeshError, NotFound
from meshrl.common.base.host.terminal import escape_controls
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.records.checkpoints import STATE_FOLDER, check_files, read_best_version
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.layout.manifest import read_complete_manifest
from meshrl.common.weights.layout.version_image import open_verified_image
from meshrl.common.weights.version_writer import ADAPTER_FOLDER, BASE_FOLDER, write_version
from meshrl.services.weights.atomic_directories import (
    EXPORT_MARKER,
    check_replaceable,
    replace_directory,
    scratch_directory,
)
from meshrl.services.weights.versions.run_versions import (
    CheckpointManifest,
    StoredVersion,
    list_versions,
    read_checkpoints,
    read_job,
)


def select_version(run: Path, step: int | None = None, want_best: bool = False) -> StoredVersion:
    """Return the last stored version, that of a step, or the best one.

    Raises:
        NotFound: It is not stored; the message lists the stored ones.
    """
    known = read_checkpoints(run)
    chunks = ChunkStore(run / "store")

    def is_stored(version: StoredVersion) -> bool:
        with suppress(CorruptData, NotFound):
            tensors = read_complete_manifest(chunks.read, version.manifest_digest).tensors
            if all(chunks.has(chunk) for chunk in {tensor.chunk for tensor in tensors}):
                return True
        return _find_valid_checkpoint(version, known) is not None

    stored = [version for version in list_versions(run) if is_stored(version)]
    if want_best:
        judged = read_best_version(run)
        if judged is None:
            fix = "Set evaluation.best to the figure that ranks versions"
            raise NotFound(f"{run} has no best version", fix=fix)
        return StoredVersion(judged.version, judged.manifest_digest)
    if not stored:
        raise NotFound(
            f"{run} has no version", fix="Start the run again: it ended before version 0"
        )
    if step is None:
        return stored[-1]
    if found := [version for version in stored if version.step == step]:
        return found[0]
    raise NotFound(
        f"{run} does not have the weights of step {step}",
        fix=(
            f"Choose one of {', '.join(str(version.step) for version in stored)}; "
            "training.keep_checkpoints and training.checkpoint_every set which are kept"
        ),
    )


def write_model_files(data: JobData, version: StoredVersion, out: Path, final_path: Path) -> None:
    """Write a version to `out`, which will be moved to `final_path`; see `write_version`.

    If the store lacks a part, the version's checkpoint is copied. CorruptData or NotFound without
    one.
    """
    try:
        tensors = read_tensors(ChunkStore(data.run_dir / "store"), version.manifest_digest)
    except (CorruptData, NotFound) as error:
        checkpoint = _find_valid_checkpoint(version, read_checkpoints(data.run_dir))
        if checkpoint is None:
            raise
        print(f"{error}; copying the model from {checkpoint} instead", file=sys.stderr)
        other = {checkpoint: [STATE_FOLDER]}  # the training state is no part of a model
        shutil.copytree(
            checkpoint, out, ignore=lambda at, _: other.get(Path(at), []), dirs_exist_ok=True
        )
        about = out / ADAPTER_FOLDER / "adapter_config.json"
        # it names the model that it belongs to
        if about.is_file() and (out / BASE_FOLDER).is_dir():
            adapter_config = json.loads(about.read_text()) | {
                "base_model_name_or_path": str(final_path / BASE_FOLDER)
            }
            about.write_text(json.dumps(adapter_config, indent=2) + "\n")
    else:
        write_version(data, load_model_config(data), tensors, out, final_path)


def _find_valid_checkpoint(
    version: StoredVersion, candidates: list[CheckpointManifest]
) -> Path | None:
    """Return the directory of the version's checkpoint if all its files are valid."""
    for path, manifest in reversed(candidates):
        if manifest["weights"] == version.manifest_digest:
            with suppress(CorruptData):
                check_files(path.with_suffix(""), manifest["files"], "")
                return path.with_suffix("")
    return None


def read_tensors(chunks: ChunkStore, manifest: str) -> Mapping[str, Tensor]:
    """Return the tensors of a version from the store's files, by its manifest's digest."""
    return open_verified_image(chunks, manifest).tensors


def export_selected(run: Path, out: Path, step: int | None, want_best: bool) -> StoredVersion:
    """Export a version to `out`; see `export_version`."""
    check_replaceable(out)
    version = select_version(run, step, want_best)
    export_version(run, version, out)
    return version


def export_version(run: Path, version: StoredVersion, out: Path) -> None:
    """Export a version to `out` atomically.

    Raises:
        Refused: `out` is no export, or another process writes it.
    """
    check_replaceable(out)
    _export_atomically(JobData.from_document(*read_job(run), str(run)), version, out)


def export_below(run: Path, directory: Path, step: int | None, want_best: bool) -> Path:
    """Export to the version's own directory below `directory`, unless it exists; return its path.

    Concurrent callers are not supported.
    """
    data = JobData.from_document(*read_job(run), str(run))
    version = select_version(run, step, want_best)
    out = directory / f"{version.step}-{version.manifest_digest}"
    if not (out / EXPORT_MARKER).is_file():
        _export_atomically(data, version, out)
    return out


def make_scratch_path(out: Path) -> Path:
    """Return the path where a model is written before it is moved to `out`."""
    return out.with_name(out.name + ".partial")


def _export_atomically(data: JobData, version: StoredVersion, out: Path) -> None:
    place = out.resolve()  # the target of a symbolic link
    with scratch_directory(make_scratch_path(place), place) as scratch:
        write_export(data, version, scratch, out)
        replace_directory(scratch, place)


def write_export(data: JobData, version: StoredVersion, directory: Path, final_path: Path) -> None:
    """Write a version with the export marker to `directory`, which will be moved to
    `final_path`.
    """
    write_model_files(data, version, directory, final_path)
    marker = {"job": data.id, "step": version.step, "manifest": version.manifest_digest}
    (directory / EXPORT_MARKER).write_text(json.dumps(marker) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path)
    where.add_argument("--below", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--best", action="store_true")
    arguments = parser.parse_args()
    selection = arguments.step, arguments.best
    try:
        if arguments.below is not None:
            print(export_below(arguments.run, arguments.below, *selection))
            return
        version = export_selected(arguments.run, arguments.out, *selection)
    except MeshError as error:
        sys.exit(escape_controls(f"error: {error}"))
    print(f"step {version.step}: {arguments.out}")


if __name__ == "__main__":
    main()
