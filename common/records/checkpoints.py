"""Finds the checkpoint of a run in its files, the one that its last recorded step commit names, and
checks that it is what was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from meshrl.common.base.digest import digest_of_file, uncounted
from meshrl.common.base.errors import BadMessage, Damaged, MeshError
from meshrl.common.base.files import damage
from meshrl.common.base.files.durable import sync, sync_tree
from meshrl.common.base.files.lines import row_of
from meshrl.common.base.files.sealed import read_sealed

NAME = re.compile(r"step-\d{3,}-\d{6,}-[0-9a-f]{8}")
STATE = "state"  # below a checkpoint's directory: all that training depends on beside the weights

MANIFEST = "version.manifest"  # below STATE: that of the weights, as the store has it
BASE_MANIFEST = "base.manifest"  # beside it, of adapters: that of what they are added to


def checkpoint_name(lineage: int, step: int, manifest: str) -> str:
    """The name of a checkpoint's manifest, without `.json`, and of the directory beside it."""
    return f"step-{lineage:03d}-{step:06d}-{manifest[:8]}"


def newest_due(version: int, every: int, last: int) -> int:
    """The newest version up to this one for which a checkpoint is due: each `every`th, and the
    last.
    """
    return version if version >= last else version - version % every


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Manifests of checkpoints in the order of lineage and step; the step of one may never have
    been committed.
    """
    return sorted((run_dir / "checkpoints").glob("step-*.json"))


def committed(run_dir: Path) -> Path | None:
    """The manifest of the last commit on record, else the newest one; None if there is none. One
    that fails its check is passed over.
    """
    found = {path.stem: path for path in all_checkpoints(run_dir)}
    names = [name for name in _committed(run_dir) if name in found]
    for name in dict.fromkeys([*names, *reversed(found)]):
        with suppress(MeshError):
            manifest_of(found[name])
            return found[name]
    return None


def older(run_dir: Path, name: str) -> list[str]:
    """Names of the checkpoints of earlier steps than the named one's, the last one first."""
    step = int(name.split("-")[2])
    names = [path.stem for path in reversed(all_checkpoints(run_dir))]
    return [other for other in names if other < name and int(other.split("-")[2]) < step]


# -- whether one is what was written ---------------------------------------------------------------


def manifest_of(path: Path) -> dict[str, Any]:
    """What a checkpoint's manifest holds: job, lineage, step, weights, account and files. NotFound
    without one, Damaged when it is not what was written, or another's.
    """
    held = read_sealed(path)
    try:
        name = checkpoint_name(held["lineage"], held["step"], held["weights"])
    except (KeyError, TypeError) as error:
        raise Damaged(f"it is no manifest of a checkpoint: {error!r}", where=str(path)) from error
    if name != path.stem:
        raise Damaged(f"it is that of {name}", where=str(path))
    try:
        check_paths(held.get("files", ()))
    except (BadMessage, TypeError) as error:
        raise Damaged(f"it lists no files of a checkpoint: {error}", where=str(path)) from error
    return held


def check_paths(files: Iterable[str]) -> None:
    """Returns if these may be paths of files below a checkpoint's directory; BadMessage names the
    first that leads out of it: whoever writes checkpoints decides on no other file of a host.
    """
    for name in files:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise BadMessage(f"{name!r:.80} is no path in a checkpoint")


def files_below(directory: Path) -> list[str]:
    """The path below a directory of every file there."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [path.relative_to(directory).as_posix() for path in files]


def digests_below(directory: Path, moved: Callable[[int], None] = uncounted) -> dict[str, str]:
    """The digest of every file below a directory, by its path there; `moved` hears of bytes as they
    are read.
    """
    return {name: digest_of_file(directory / name, moved) for name in files_below(directory)}


def check_files(directory: Path, files: dict[str, str], below: str = STATE) -> None:
    """Returns if the files of a checkpoint's directory, those below `below` of it, are what its
    manifest lists in `files`; Damaged names the first that is not. It reads all of them.
    """
    listed = {name: digest for name, digest in files.items() if Path(name).is_relative_to(below)}
    if not listed:
        raise Damaged("its manifest lists no file", where=str(directory / below))
    for name, digest in listed.items():
        path = directory / name
        if not path.is_file():
            raise Damaged("it is missing", where=str(path))
        if digest_of_file(path) != digest:
            raise Damaged("it is not what its digest says", where=str(path))


def verified(path: Path) -> dict[str, Any]:
    """What `manifest_of` gives, once the files that training goes on from are checked too: Damaged
    or NotFound names the first that is not what was written. Weights are checked chunk by chunk
    when they are fetched: what the store lacks of them is made again from the checkpoint.
    """
    held = manifest_of(path)
    check_files(path.with_suffix(""), held["files"])
    return held


def set_aside(path: Path) -> Path | None:
    """Moves the manifest of a damaged checkpoint and the directory beside it to the quarantine of
    their run; where the manifest lies now, or the directory if there was no manifest. None:
    somebody else has done so.
    """
    moved = None
    for part in (path.with_suffix(""), path):
        with suppress(FileNotFoundError):
            moved = damage.set_aside(part, path.parent.parent)
    return moved


def appear(
    scratch: Path,
    directory: Path,
    written: Mapping[str, str] = MappingProxyType({}),
    moved: Callable[[int], None] = uncounted,
) -> dict[str, str]:
    """Makes `scratch` the directory of a checkpoint, whole or not at all, whenever the power goes;
    the digests of its files. What is there already stays if it is the same. `moved` hears of bytes
    as they are read. Damaged when a file is not as it was `written`, by its digest then.
    """
    digests = digests_below(scratch, moved)
    check_written(scratch, digests, written)
    if directory.exists() and digests_below(directory, moved) != digests:
        damage.set_aside(directory, directory.parent.parent)
    if not directory.exists():
        sync_tree(scratch)
        scratch.rename(directory)
    sync(directory.parent)
    return digests


def check_written(scratch: Path, found: Mapping[str, str], written: Mapping[str, str]) -> None:
    """Damaged when the digest of a file that was `written` is not `found` again."""
    for name, digest in written.items():
        if found.get(name) != digest:
            raise Damaged(
                "a file of a checkpoint is not what was written to it a moment ago",
                where=str(scratch / name),
                fix="See whether the disk is well; the next checkpoint is written anew",
            )


# -- what the record tells -------------------------------------------------------------------------


def last_named(run_dir: Path) -> str:
    """The checkpoint that the last recorded step commit names, wherever it is; empty: none does."""
    return next(_committed(run_dir), "")


def _committed(run_dir: Path) -> Iterator[str]:
    for event in _recorded(run_dir, "step", order=-1):
        if event["kind"] == "step" and (name := event["fields"].get("checkpoint", "")):
            yield name


def steps_done(run_dir: Path) -> int:
    """The version of the last step commit or lineage on record; 0 without one."""
    for event in _recorded(run_dir, "step", "lineage", order=-1):
        if event["kind"] in ("step", "lineage", "restored"):
            return int(event["fields"]["version"])
    return 0


def last_lineage(run_dir: Path) -> int:
    """The highest lineage that a run's record or its checkpoints mention; 0 when none does."""
    found = [int(path.name.split("-")[1]) for path in all_checkpoints(run_dir)]
    events = _recorded(run_dir, "lineage")
    found += (event["fields"].get("lineage", 0) for event in events)
    return max(found, default=0)


def _recorded(run_dir: Path, *words: str, order: int = 1) -> Iterator[Any]:
    """The events of a run whose lines have one of these words in quotes; `order` -1: the last one
    first. Lines that are damaged, or were cut off while they were written, are left out.
    """
    path, quoted = run_dir / "events.jsonl", [f'"{word}"'.encode() for word in words]
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for line in lines[::order]:
        if any(word in line for word in quoted) and (event := row_of(line)) is not None:
            yield event


@dataclass(frozen=True)
class Best:
    """The version that evaluation found best so far."""

    version: int
    manifest: str  # digest of its weights
    value: float  # the figure that it was judged by


def best(run_dir: Path) -> Best | None:
    """The best version by the run's record; None: no evaluation has compared versions, or none
    since a new lineage abandoned the best one.
    """
    found: Best | None = None
    for event in _recorded(run_dir, "evaluation", "lineage"):
        kind, told = event["kind"], event["fields"]
        if kind == "lineage" and found is not None and found.version > int(told["version"]):
            found = None
        elif kind == "evaluation" and told.get("best"):
            found = Best(int(told["step"]), str(told["manifest"]), float(told["value"]))
    return found


def is_first(path: Path) -> bool:
    """Whether it is of version 0, for which nothing has been trained."""
    return path.name.split("-")[2] == "000000"
