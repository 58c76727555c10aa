"""Process that reads jobs against a Hub, whose address `huggingface_hub` takes at its import.

Each line of the input is a request, and each line of the output its answer, both JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import MeshError
from meshrl.job import dataset_rows, hub_origins, job_reader
from meshrl.job.bundle import pack_bundle
from meshrl.job.job_file import JobFile


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Read a job with the request's environment, and also pack it if the request has `pack`."""
    os.environ.pop("HF_TOKEN", None)
    os.environ |= request.get("env", {})
    absent = dict.fromkeys(request.get("absent", []))  # packages that cannot be imported
    kept = {name: sys.modules.get(name) for name in absent}
    sys.modules.update(absent)
    try:
        return read(request)
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a job has."""
    job: JobFile = job_reader.read_job_file(Path(request["path"]), request["settings"])
    rows = {s.key: [row.value for row in dataset_rows.read_rows(s)] for s in job.datasets}
    found: dict[str, Any] = {
        "model": job.config.model.path,
        "revision": job.config.model.revision,
        "portable": hub_origins.restore_ids(job.config).to_document(),
        "rows": rows,
    }
    if request.get("pack"):
        with tempfile.TemporaryDirectory() as run_dir:
            directory, document = pack_bundle(job.config, job.base, Path(run_dir))
            found["document"] = document
            found["files"] = sorted(p.name for p in directory.rglob("*") if p.is_file())
            again, _ = job_reader.reload_document(document, [])
            found["reloaded"] = again.config.model.path
    return found


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        with contextlib.redirect_stderr(io.StringIO()) as notices:
            try:
                found = answer(json.loads(line))
            except MeshError as error:
                found = {"error": str(error)}
        print(json.dumps(found | {"notices": notices.getvalue()}), flush=True)


if __name__ == "__main__":
    main()
