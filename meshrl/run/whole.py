"""Checks that all is there that a run goes on from, before a mesh starts: its bundle, and the
checkpoint that its last commit names.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.api.weights import Manifest
from common.errors import BadMessage, Damaged, NotFound
from common.job import bundle_files
from common.records.checkpoints import STATE, all_checkpoints, committed, is_first, last_named
from common.wire.blob import unpack
from common.wire.chunks import ChunkStore
from meshrl.launch.places import MeshPlace, read_json

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
    newest, redis = committed(run_dir), place.redis.is_dir() and any(place.redis.iterdir())
    named = last_named(run_dir)
    if redis and named and (newest is None or newest.stem != named):
        path = run_dir / "checkpoints" / f"{named}.json"
        fix = _START_OVER
        if newest is not None and place.root == run_dir:
            fix = f"To go on from {newest.stem} instead: {_aside(place.redis)}"
        raise NotFound(f"the run's checkpoint is not whole: {path} is missing or damaged", fix=fix)
    if newest is None or (is_first(newest) and not redis):
        return
    missing = _missing_of(newest, ChunkStore(place.root / "store"))
    if missing is None:
        return
    older = [path for path in all_checkpoints(run_dir) if path < newest]
    fix = _START_OVER
    if older:
        fix = f"To go on from {older[-1].stem} instead: {_aside(newest)}"
        if place.root == run_dir:
            fix += f"; {_aside(place.redis)}"
    raise NotFound(f"the run's checkpoint {newest.stem} is not whole: {missing}", fix=fix)


def _aside(path: Path) -> str:
    """The command that puts something out of the way, and deletes nothing."""
    return shlex.join(["mv", str(path), f"{path}.aside"])


def _missing_of(checkpoint: Path, chunks: ChunkStore) -> str | None:
    """What a checkpoint lacks; None: it is whole."""
    state = checkpoint.with_suffix("") / STATE
    try:
        weights = str(read_json(checkpoint)["weights"])
        manifest = chunks.path(weights)
    except (Damaged, KeyError, BadMessage):
        return f"{checkpoint} is damaged"
    if not any(state.glob("*.safetensors")):
        return f"{state} is missing or empty"
    if not manifest.is_file():
        return f"{manifest} is missing"
    try:
        tensors = unpack(Manifest, manifest.read_bytes()).tensors
    except BadMessage:
        return f"{manifest} is damaged"
    absent = [path for path in {chunks.path(t.chunk) for t in tensors} if not path.is_file()]
    return _named(sorted(absent)) if absent else None


def _named(paths: list[Path]) -> str:
    shown = ", ".join(map(str, paths[:NAMED]))
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return f"{shown}{more} {'is' if len(paths) == 1 else 'are'} missing"


_START_OVER = "To start over: meshrl run JOB"
