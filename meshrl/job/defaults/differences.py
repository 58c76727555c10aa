"""Keys of a job that differ from the defaults, as a document that describes the same job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrl.common.job.config import JobConfig
from meshrl.job.defaults.choices import OPEN_KEYS, is_stated
from meshrl.job.job_file import JobFile


def select_differences(job: JobFile) -> dict[str, Any]:
    """Return the document of a job without the values that a job file has by default.

    Chosen values stay, and so do stated values of keys that would otherwise be chosen.
    """
    kept = {choice.key for choice in job.choices}
    if job.config.model.path or job.config.mesh.device == "cuda":
        kept |= {key for key in OPEN_KEYS if is_stated(job.raw_document, key)}
    defaults = JobConfig().to_document()
    defaults["cache"] = str(Path(defaults["cache"]).expanduser())
    return _select(job.config.to_document(), defaults, kept, "")


def _select(
    document: dict[str, Any], defaults: dict[str, Any], kept: set[str], within: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        key, default = within + name, defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _select(value, default, kept, f"{key}."):
                found[name] = inner
        elif name not in defaults or value != default or key in kept:
            found[name] = value
    return found
