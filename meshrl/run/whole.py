"""Checks that all is there that a run goes on from, before a mesh starts: its bundle, and the
checkpoint that its last commit names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import BadMessage, Damaged, NotFound
from meshrl.common.job.bundle import bundle_files
from meshrl.common.records.checkpoints import (
    STATE,
    all_checkpoints,
    is_first,
    last_named,
    manifest_of,
)
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.layout.manifest import read_whole
from meshrl.directory.places import MeshPlace

NAMED = 3  # missing files that an error names


def check(run_dir: Path, held: Mapping[str, Any], place: MeshPlace) -> None:
    """Returns if the run is whole; NotFound or Damaged names what is not. Files of its record are
    mended when it goes on.
    """
    if place.root != run_dir and not place.directory.is_dir():
        raise NotFound(
            f"the mesh that the run in {run_dir} was submitted to is gone: {place.root}",
            fix="Its Redis data and weights were there. " + _START_OVER,
        )
    _bundle(run_dir, held)
    _checkpoint(run_dir, place)


def _bundle(run_dir: Path, held: Mapping[str, Any]) -> None:
    told = held["document"]["bundle"]
    bundle = Path(told["dir"])
    if not bundle.is_relative_to(run_dir.resolve()) and not bundle.is_relative_to(run_dir):
        made = bundle.parent.parent
        raise NotFound(
            f"the run in {run_dir} was made in {made}, and its records name that place",
            fix=f"Move it back: mv {run_dir} {made}",
        )
    if not bundle.is_dir():
        raise NotFound(f"the run is not whole: {bundle} is missing", fix=bundle_files.START_OVER)
    try:
        bundle_files.check(bundle, bundle_files.of(held["document"]), large=True)
    except Damaged as error:
        raise Damaged(f"the run is not whole: {error.message}", fix=error.fix) from error


def _checkpoint(run_dir: Path, place: MeshPlace) -> None:
    """Returns if there is a checkpoint to go on from, or nothing to go on from: the trainer passes
    over those that are not whole, and checks every byte of the one that it takes.
    """
    named, paths = last_named(run_dir), all_checkpoints(run_dir)
    redis = place.redis.is_dir() and any(place.redis.iterdir())
    if (not named and not paths) or (not redis and all(is_first(path) for path in paths)):
        return
    chunks = ChunkStore(place.root / "store")
    trouble = f"{run_dir / 'checkpoints' / named}.json: it is missing"
    for number, path in enumerate(reversed(paths)):
        missing = _missing_of(path, chunks)
        if missing is None:
            return
        trouble = trouble if number else missing
    raise NotFound(
        f"no checkpoint of the run is whole: {trouble}",
        fix="Put it back from a copy of the run. " + _START_OVER,
    )


def _missing_of(checkpoint: Path, chunks: ChunkStore) -> str | None:
    """What a checkpoint lacks, as far as names tell; None: nothing."""
    directory = checkpoint.with_suffix("")
    try:
        held = manifest_of(checkpoint)
    except (Damaged, NotFound) as error:
        return f"{checkpoint}: {error.message}"
    listed = {directory / name: Path(name).is_relative_to(STATE) for name in held["files"]}
    missing = sorted(path for path in listed if not path.is_file())
    if any(listed[path] for path in missing) or not any(listed.values()):
        return _named(missing or [directory / STATE])
    if not missing:  # the store's weights can be made again
        return None
    try:
        tensors = read_whole(chunks.read, held["weights"]).tensors
    except (NotFound, Damaged, BadMessage) as error:
        return f"{_named(missing)}, and {chunks.path(held['weights'])}: {error.message}"
    absent = [path for path in {chunks.path(t.chunk) for t in tensors} if not path.is_file()]
    return _named(missing + sorted(absent)) if absent else None


def _named(paths: list[Path]) -> str:
    shown = ", ".join(map(str, paths[:NAMED]))
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return f"{shown}{more} {'is' if len(paths) == 1 else 'are'} missing"


_START_OVER = "To start over: meshrl run JOB"
