"""Download of a run from a URL to a directory of this host, where commands use it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import quote

from meshrl.common.base.errors import BadMessage, CorruptData, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.remote_directory import PART_SUFFIX, RemoteDirectory
from meshrl.common.records.checkpoints import check_paths
from meshrl.directory.directory_paths import format_path
from meshrl.directory.job_file import SOURCE_URL_KEY


def download_run(url: str) -> Path:
    """Download the run at a URL to `runs/NAME`, atomically.

    Raises NotFound when there is no run, Refused when there is a directory of that name.
    """
    there = RemoteDirectory(url, "RUN", "the URL")
    try:
        record = documents.decode(there.read_file("job.json"), f"{there.public_url}/job.json")
        run_dir = Path("runs", quote(record["job"], safe="")).absolute()
        digest = str(record["document"]["bundle"]["digest"])
    except NotFound as error:
        raise NotFound(f"there is no run at {there.public_url}: it has no job.json") from error
    if os.path.lexists(run_dir):
        raise Refused(
            f"{format_path(run_dir)} already exists; {there.public_url} cannot be downloaded to it",
            fix=f"Name {format_path(run_dir)} if it is that run, or move it away",
        )
    names = [name for name in there.list_file_sizes() if not name.endswith(PART_SUFFIX)]
    try:
        check_paths([digest, *names])
    except BadMessage as error:
        raise CorruptData(f"this is not a run: {error.message}", where=there.public_url) from error
    scratch = run_dir.with_name(f".{run_dir.name}.brought")
    shutil.rmtree(scratch, ignore_errors=True)
    for name in names:
        there.fetch_file(name, scratch / name)
    # It is a run of its own here: its mesh is elsewhere, and its bundle is beside it.
    record.pop("mesh", None)
    record[SOURCE_URL_KEY] = there.public_url
    record["document"]["bundle"]["dir"] = str(run_dir / "bundle" / digest)
    documents.write(scratch / "job.json", record)
    scratch.rename(run_dir)
    print(f"{there.public_url} is downloaded to {format_path(run_dir)}", flush=True)
    return run_dir
