"""Writes a version of a run as a Hugging Face directory, from the run's files alone, while it goes
on or afterwards.

`python -m services.weights.export --run RUN --out DIR [--step N | --best]`; without either, the
last committed version.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from common.api.weights import Manifest
from common.errors import Damaged, MeshError, NotFound, Refused
from common.job.job_data import JobData
from common.job.model_shape import model_config
from common.model.output import ADAPTER, BASE, write_version
from common.model.transfer import tensors_of
from common.records import documents
from common.records.checkpoints import STATE, all_checkpoints, best, check_files, manifest_of
from common.records.lines import whole
from common.wire.blob import unpack
from common.wire.bulk import ChunkStore

MARKER = "meshrl.json"  # marks a directory that an export wrote, and the next one may replace
Checkpoint = tuple[Path, dict[str, Any]]  # the path of its manifest, and what that holds
COMMITS = ("initial", "step", "lineage", "restored")  # events that name the current version


@dataclass(frozen=True)
class Version:
    step: int
    manifest: str  # digest


def versions(run: Path) -> list[Version]:
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
        found = {held["step"]: held["weights"] for _, held in _checkpoints(run)}
    return [Version(step, digest) for step, digest in sorted(found.items())]


def chosen(run: Path, step: int | None = None, the_best: bool = False) -> Version:
    """The last version that is stored, or the one of a step, or the best; NotFound says which
    there are.
    """
    known = _checkpoints(run)
    stored = [version for version in versions(run) if _is_stored(run, version, known)]
    if the_best:
        found = best(run)
        if found is None:
            raise NotFound(
                f"{run} has no best version",
                fix="name the figure to judge by in evaluation.best",
            )
        return Version(found.version, found.manifest)
    if not stored:
        raise NotFound(f"{run} has no version", fix="the run ended before version 0")
    if step is None:
        return stored[-1]
    for version in stored:
        if version.step == step:
            return version
    raise NotFound(
        f"{run} does not hold the weights of step {step}",
        fix=f"it holds those of {', '.join(str(version.step) for version in stored)}; "
        "training.keep_checkpoints and training.checkpoint_every say which are kept",
    )


def export(data: JobData, version: Version, out: Path, final: Path) -> None:
    """Writes a version to `out`, which is to become `final`; see `write_version`. What the store
    has not whole is copied from the version's checkpoint; Damaged or NotFound without one.
    """
    try:
        tensors = read_tensors(ChunkStore(data.run_dir / "store"), version.manifest)
    except (Damaged, NotFound) as error:
        checkpoint = _checkpoint(version, _checkpoints(data.run_dir))
        if checkpoint is None:
            raise
        print(f"{error}; the model is copied from {checkpoint}", file=sys.stderr)
        _copy(checkpoint, out, final)
    else:
        write_version(data, model_config(data), tensors, out, final)


def _checkpoints(run: Path) -> list[Checkpoint]:
    """Those whose manifests are whole, in the order of lineage and step."""
    found = []
    for path in all_checkpoints(run):
        with suppress(Damaged, NotFound):
            found.append((path, manifest_of(path)))
    return found


def _checkpoint(version: Version, known: list[Checkpoint]) -> Path | None:
    """The directory of the version's checkpoint, if all of it is as it was written."""
    for path, held in reversed(known):
        if held["weights"] == version.manifest:
            with suppress(Damaged):
                check_files(path.with_suffix(""), held["files"], "")
                return path.with_suffix("")
    return None


def _copy(checkpoint: Path, out: Path, final: Path) -> None:
    """The files of a checkpoint that `write_version` wrote, for another place."""
    shutil.copytree(
        checkpoint, out, ignore=lambda at, _: [STATE] * (Path(at) == checkpoint), dirs_exist_ok=True
    )
    about = out / ADAPTER / "adapter_config.json"
    if about.is_file() and (out / BASE).is_dir():  # it names the model that it belongs to
        told = json.loads(about.read_text()) | {"base_model_name_or_path": str(final / BASE)}
        about.write_text(json.dumps(told, indent=2) + "\n")


def read_tensors(chunks: ChunkStore, manifest: str) -> dict[str, Tensor]:
    """The tensors of a manifest's digest, from the store's files."""
    described = unpack(Manifest, chunks.read(manifest)).tensors
    content = {chunk: chunks.read(chunk) for chunk in {t.chunk for t in described}}
    return tensors_of(described, content)


def _is_stored(run: Path, version: Version, known: list[Checkpoint]) -> bool:
    chunks = ChunkStore(run / "store")
    try:
        described = unpack(Manifest, chunks.read(version.manifest)).tensors
    except (Damaged, NotFound):
        return _checkpoint(version, known) is not None
    complete = all(chunks.has(chunk) for chunk in {t.chunk for t in described})
    return complete or _checkpoint(version, known) is not None


def _job(run: Path) -> JobData:
    """The run's job; Damaged when `job.json` does not tell it, NotFound without one."""
    path = run / "job.json"
    try:
        held = documents.decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise NotFound(f"there is no run in {run}: it has no job.json") from None
    job, document = held.get("job"), held.get("document")
    if not isinstance(job, str) or not isinstance(document, dict):
        raise Damaged("it names no job, or not what the job is", where=str(path))
    return JobData.of(job, document, str(run))


def write(run: Path, out: Path, step: int | None, the_best: bool) -> Version:
    """Exports to `out`, which holds either what it did or all of the new; Refused when that would
    delete something else than an export.
    """
    scratch = out.with_name(out.name + ".partial")
    for path in (out, scratch):
        _check_ours(path)
    data = _job(run)
    version = chosen(run, step, the_best)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    marker = {"job": data.id, "step": version.step, "manifest": version.manifest}
    (scratch / MARKER).write_text(json.dumps(marker) + "\n")
    export(data, version, scratch, out)
    if out.exists():
        shutil.rmtree(out)
    scratch.rename(out)
    return version


def _check_ours(out: Path) -> None:
    """Refused when `out` is anything but absent, empty or an export."""
    if not out.exists() or (out / MARKER).is_file():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise Refused(
            f"{out} was not written by an export: it has no {MARKER}",
            fix="name another --out, or move it away",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--best", action="store_true")
    arguments = parser.parse_args()
    try:
        version = write(arguments.run, arguments.out, arguments.step, arguments.best)
    except MeshError as error:
        sys.exit(f"error: {error}")
    print(f"step {version.step}: {arguments.out}")


if __name__ == "__main__":
    main()
