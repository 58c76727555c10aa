"""Check of the keys that select a part of a dataset."""

from __future__ import annotations

from pathlib import Path

from meshrl.job.hub.repository import is_hub_id
from meshrl.job.job_file import JobFile
from meshrl.job.row_files.data_source import DataSource

DEFAULTS = {"revision": ("",), "config": ("",), "split": ("train", "test")}


def check_source_options(job: JobFile) -> None:
    """Check that each stated option applies to a dataset of its table."""
    for option, defaults in DEFAULTS.items():
        by_key: dict[str, list[DataSource]] = {}
        for source in job.datasets:
            by_key.setdefault(source.get_option_key(option), []).append(source)
        for key, sources in by_key.items():
            is_stated = getattr(sources[0], option) not in defaults
            if is_stated and not any(_takes_option(source, option) for source in sources):
                places = "a Hub id" if option == "revision" else "a Hub id or a directory"
                wrong = f"{key} is for {places}, but {sources[0].key} is {sources[0].path}"
                raise job.make_error(key, wrong, "Remove the key")


def _takes_option(source: DataSource, option: str) -> bool:
    return is_hub_id(source.path) or (option != "revision" and Path(source.path).is_dir())
