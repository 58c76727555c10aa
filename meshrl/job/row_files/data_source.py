"""Sources of a job's rows: paths or Hub ids, and the keys that select a part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.common.job.config import JobConfig

SPLIT_KEYS = {  # of the datasets whose table has two of them
    "dataset.train": "dataset.train_split",
    "dataset.held_out": "dataset.held_out_split",
}


@dataclass(frozen=True)
class DataSource:
    """Path or Hub id of a dataset, and the part of it that is read."""

    path: str  # absolute path, pattern or Hub id
    key: str = "dataset.train"  # job key that names it
    split: str = "train"
    config: str = ""
    revision: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)  # row key -> existing, dotted key
    prompt_column: str = ""  # the one of `columns` that is the option `prompt`

    @property
    def is_trained(self) -> bool:
        """True for a source of training rows."""
        return self.key == "dataset.train" or self.key.startswith("dataset.mix[")

    def get_option_key(self, option: str) -> str:
        """Return the job key of an option: `split`, `config`, `revision` or `columns`."""
        if option == "split" and self.key in SPLIT_KEYS:
            return SPLIT_KEYS[self.key]
        return f"{self.key.rpartition('.')[0]}.{option}"


def list_sources(config: JobConfig) -> list[DataSource]:
    """Return the sources of a job's rows."""
    dataset = config.dataset
    sources = [
        DataSource(
            d.path,
            f"dataset.mix[{i}].path",
            d.split,
            d.config,
            d.revision,
            d.columns | ({dataset.prompt: d.prompt} if d.prompt else {}),
            dataset.prompt if d.prompt else "",
        )
        for i, d in enumerate(dataset.mix)
    ]
    sources += [
        DataSource(
            path,
            key,
            split,
            config=dataset.config,
            revision=dataset.revision,
            columns=dataset.columns,
        )
        for key, path, split in (
            ("dataset.train", dataset.train, dataset.train_split),
            ("dataset.held_out", dataset.held_out, dataset.held_out_split),
        )
        if path
    ]
    return sources + [
        DataSource(
            d.path, f"evaluation.datasets[{i}].path", d.split, d.config, d.revision, d.columns
        )
        for i, d in enumerate(config.evaluation.datasets)
    ]
