"""A run that lies at a URL, brought to a directory of this host: commands take it from there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import quote

from meshrl.common.base.errors import BadMessage, Damaged, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.at_url import PART, AtUrl
from meshrl.common.records.checkpoints import check_paths
from meshrl.directory.job_file import BROUGHT
from meshrl.directory.places import shown


def brought(url: str) -> Path:
    """`runs/NAME` with what lies at a URL, whole or not at all. NotFound when no run does, Refused
    when there is a directory of that name.
    """
    there = AtUrl(url, "RUN", "the URL")
    try:
        held = documents.decode(there.content("job.json"), f"{there.shown}/job.json")
        run_dir = Path("runs", quote(held["job"], safe="")).absolute()
        digest = str(held["document"]["bundle"]["digest"])
    except NotFound as error:
        raise NotFound(f"no run lies at {there.shown}: it has no job.json") from error
    if os.path.lexists(run_dir):
        raise Refused(
            f"{shown(run_dir)} is there already, and {there.shown} would be brought there",
            fix=f"Name {shown(run_dir)} if it is that run, or move it away",
        )
    names = [name for name in there.sizes() if not name.endswith(PART)]
    try:
        check_paths([digest, *names])
    except BadMessage as error:
        raise Damaged(f"what lies there is no run: {error.message}", where=there.shown) from error
    scratch = run_dir.with_name(f".{run_dir.name}.brought")
    shutil.rmtree(scratch, ignore_errors=True)
    for name in names:
        there.fetch_file(name, scratch / name)
    # It is a run of its own here: its mesh is elsewhere, and its bundle lies beside it.
    held.pop("mesh", None)
    held[BROUGHT] = there.shown
    held["document"]["bundle"]["dir"] = str(run_dir / "bundle" / digest)
    documents.write(scratch / "job.json", held)
    scratch.rename(run_dir)
    print(f"{there.shown} is in {shown(run_dir)}", flush=True)
    return run_dir
