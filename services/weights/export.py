"""Writes a version of a run as a Hugging Face directory, from the run's files alone, while it goes
on or afterwards.

`python -m meshrl.services.weights.export --run RUN --out DIR [--step N | --best]`; without either,
the last committed version. `--below DIR` in place of `--out` gives each version a directory of its
own in DIR, writes it unless it is there, and prints its path last.
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

from meshrl.common.base.errors import Damaged, MeshError, NotFound
from meshrl.common.base.host.terminal import visible
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.records.checkpoints import STATE, best, check_files
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.layout.images import opened
from meshrl.common.weights.layout.manifest import read_whole
from meshrl.common.weights.output import ADAPTER, BASE, write_version
from meshrl.services.weights.making import MARKER, check_ours, making, put
from meshrl.services.weights.versions.known import (
    Checkpoint,
    StoredVersion,
    checkpoints,
    described,
    versions,
)


def chosen(run: Path, step: int | None = None, the_best: bool = False) -> StoredVersion:
    """The last version that is stored, or the one of a step, or the best; NotFound says which
    there are.
    """
    known = checkpoints(run)
    chunks = ChunkStore(run / "store")

    def is_stored(version: StoredVersion) -> bool:
        with suppress(Damaged, NotFound):
            tensors = read_whole(chunks.read, version.manifest).tensors
            if all(chunks.has(chunk) for chunk in {tensor.chunk for tensor in tensors}):
                return True
        return _checkpoint(version, known) is not None

    stored = [version for version in versions(run) if is_stored(version)]
    if the_best:
        judged = best(run)
        if judged is None:
            fix = "name the figure to judge by in evaluation.best"
            raise NotFound(f"{run} has no best version", fix=fix)
        return StoredVersion(judged.version, judged.manifest)
    if not stored:
        raise NotFound(f"{run} has no version", fix="the run ended before version 0")
    if step is None:
        return stored[-1]
    if found := [version for version in stored if version.step == step]:
        return found[0]
    raise NotFound(
        f"{run} does not hold the weights of step {step}",
        fix=f"it holds those of {', '.join(str(version.step) for version in stored)}; "
        "training.keep_checkpoints and training.checkpoint_every say which are kept",
    )


def export(data: JobData, version: StoredVersion, out: Path, final: Path) -> None:
    """Writes a version to `out`, which is to become `final`; see `write_version`. What the store
    has not whole is copied from the version's checkpoint; Damaged or NotFound without one.
    """
    try:
        tensors = read_tensors(ChunkStore(data.run_dir / "store"), version.manifest)
    except (Damaged, NotFound) as error:
        checkpoint = _checkpoint(version, checkpoints(data.run_dir))
        if checkpoint is None:
            raise
        print(f"{error}; the model is copied from {checkpoint}", file=sys.stderr)
        other = {checkpoint: [STATE]}  # what training goes on from is no part of a model
        shutil.copytree(
            checkpoint, out, ignore=lambda at, _: other.get(Path(at), []), dirs_exist_ok=True
        )
        about = out / ADAPTER / "adapter_config.json"
        if about.is_file() and (out / BASE).is_dir():  # it names the model that it belongs to
            told = json.loads(about.read_text()) | {"base_model_name_or_path": str(final / BASE)}
            about.write_text(json.dumps(told, indent=2) + "\n")
    else:
        write_version(data, model_config(data), tensors, out, final)


def _checkpoint(version: StoredVersion, known: list[Checkpoint]) -> Path | None:
    """The directory of the version's checkpoint, if all of it is as it was written."""
    for path, held in reversed(known):
        if held["weights"] == version.manifest:
            with suppress(Damaged):
                check_files(path.with_suffix(""), held["files"], "")
                return path.with_suffix("")
    return None


def read_tensors(chunks: ChunkStore, manifest: str) -> Mapping[str, Tensor]:
    """The tensors of a manifest's digest, from the store's files."""
    return opened(chunks, manifest).tensors


def write(run: Path, out: Path, step: int | None, the_best: bool) -> StoredVersion:
    """Exports a version to `out`; see `write_one`."""
    check_ours(out)
    version = chosen(run, step, the_best)
    write_one(run, version, out)
    return version


def write_one(run: Path, version: StoredVersion, out: Path) -> None:
    """Exports to `out`, which holds either what it did or all of the new; Refused when that would
    delete something else than an export, and while another process does so.
    """
    check_ours(out)
    _write(JobData.of(*described(run), str(run)), version, out)


def write_below(run: Path, directory: Path, step: int | None, the_best: bool) -> Path:
    """Exports to a directory below `directory` which is the version's alone, and is not changed
    once it is there; its path. For one caller at a time.
    """
    data = JobData.of(*described(run), str(run))
    version = chosen(run, step, the_best)
    out = directory / f"{version.step}-{version.manifest}"
    if not (out / MARKER).is_file():
        _write(data, version, out)
    return out


def scratch_of(out: Path) -> Path:
    """Where a model is written that is to become `out` when it is whole."""
    return out.with_name(out.name + ".partial")


def _write(data: JobData, version: StoredVersion, out: Path) -> None:
    place = out.resolve()  # of a link, what it leads to
    with making(scratch_of(place), place) as made:
        fill(data, version, made, out)
        put(made, place)


def fill(data: JobData, version: StoredVersion, directory: Path, final: Path) -> None:
    """Writes a version to a `directory` that is to become `final`, and that it is one."""
    export(data, version, directory, final)
    marker = {"job": data.id, "step": version.step, "manifest": version.manifest}
    (directory / MARKER).write_text(json.dumps(marker) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path)
    where.add_argument("--below", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--best", action="store_true")
    arguments = parser.parse_args()
    asked = arguments.step, arguments.best
    try:
        if arguments.below is not None:
            print(write_below(arguments.run, arguments.below, *asked))
            return
        version = write(arguments.run, arguments.out, *asked)
    except MeshError as error:
        sys.exit(visible(f"error: {error}"))
    print(f"step {version.step}: {arguments.out}")


if __name__ == "__main__":
    main()
