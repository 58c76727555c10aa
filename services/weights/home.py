"""What the store does with files at a run's home for processes that do not see it: it lays
checkpoints out, makes their files and those of bundles chunks, and clears up.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from common.api.transfer.bulk import PUBLISHED
from common.base.errors import NotFound, Refused
from common.job.bundle import bundle_files
from common.mesh.process.host import Host
from common.records.checkpoints import (
    appear,
    check_paths,
    digests_below,
    manifest_of,
    set_aside,
)
from common.records.run_lines import RunLineFile
from common.state.jobs import JobRow
from common.weights.chunks.chunks import ChunkStore

LAYING = ".laying-"  # in the name of a directory that is being laid out


Moved = Callable[[int], None]  # hears of bytes that were read or copied


def lay_out(chunks: ChunkStore, manifest: Path, files: dict[str, str], moved: Moved) -> None:
    """Makes the directory of a checkpoint, beside its manifest to be, of chunks: whole or not at
    all. Refused when one of them is not there, BadMessage when a path leads out of the directory.
    """
    directory = manifest.with_suffix("")
    check_paths(files)
    if directory.is_dir() and digests_below(directory, moved) == files:
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Of this call alone: one that stood still may go on beside the next.
    scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}{LAYING}", dir=directory.parent))
    try:
        chunks.lay_out(files, scratch, moved)
        appear(scratch, directory, moved=moved)
    except NotFound as error:
        raise Refused(error.message, where=error.where, fix="put the files first") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(
    chunks: ChunkStore, row: JobRow, checkpoint: str, below: Sequence[str], moved: Moved
) -> dict[str, str]:
    """Makes files of a job's bundle, or of a checkpoint, chunks; their digests by path. NotFound
    when one is missing, Damaged when the checkpoint's manifest is not what was written.
    """
    if checkpoint:
        directory = Path(row.run_dir) / "checkpoints" / checkpoint
        files = dict(manifest_of(directory.with_name(f"{checkpoint}.json"))["files"])
    else:
        directory = Path(row.document["bundle"]["dir"])
        files = {name: str(digest) for name, (_, digest) in bundle_files.of(row.document).items()}
    chosen = {
        name: digest
        for name, digest in files.items()
        if not below or any(Path(name).is_relative_to(part) for part in below)
    }
    published = chunks.space(PUBLISHED)
    for name, digest in chosen.items():
        published.take_in(directory / name, digest, moved)
    return chosen


def keep_lines(host: Host, row: JobRow, name: str, lines: bytes) -> None:
    """Appends lines to a file of samples or traces of a run; StorageFull, BadMessage."""
    file = RunLineFile(host, Path(row.run_dir), name)
    try:
        file.write(lines)
    finally:
        file.shut()


def clear(directory: Path, committed: str, aside: Callable[[Path, Path], None]) -> None:
    """Removes what is left of checkpoints that were never named, not the one that is committed: if
    its manifest is gone, it is damaged. So is an older one without its manifest, which is set
    aside: `aside` hears at once which manifest is missing, and where the rest lies now.
    """
    for path in sorted(directory.glob("step-*")):
        manifest = path.with_name(f"{path.name}.json")
        if not path.is_dir() or path.name == committed or manifest.is_file():
            continue
        # A scratch directory has a point in its name; nothing has named it, nor one that is newer.
        if "." in path.name or path.name > committed:
            shutil.rmtree(path, ignore_errors=True)
        elif (kept := set_aside(manifest)) is not None:
            aside(manifest, kept)
