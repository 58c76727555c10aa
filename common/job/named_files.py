"""Files that a job names, by key, and the path of each in the job's bundle."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from meshrl.common.job.config import INITIAL, JobConfig

TOKENIZER = "model.tokenizer"
DATASET_PREFIXES = ("dataset.", "evaluation.")  # of keys that name files of rows


@dataclass(frozen=True)
class NamedFile:
    """Key that names a file or a directory."""

    key: str  # dotted
    path: str  # in the job; empty: none
    bundle_path: str  # in the bundle

    @property
    def is_dataset(self) -> bool:
        """True for a file of rows."""
        return self.key.startswith(DATASET_PREFIXES)

    @property
    def is_model(self) -> bool:
        """True for the directory of a model."""
        return not self.is_dataset and self.key != TOKENIZER


def list_named_files(config: JobConfig) -> list[NamedFile]:
    """Return all keys that name a file of the bundle, those without a path too."""
    dataset = config.dataset
    return [
        NamedFile("model.path", config.model.path, "model"),
        NamedFile(TOKENIZER, config.model.tokenizer, "tokenizer/tokenizer.json"),
        NamedFile("dataset.train", dataset.train, "data/train.jsonl"),
        *(
            NamedFile(
                f"dataset.mix[{i}].path",
                d.path,
                f"data/mix-{i}-{_name_source(d.path).removeprefix(f'mix-{i}-')}.jsonl",
            )
            for i, d in enumerate(dataset.mix)
        ),
        NamedFile("dataset.held_out", dataset.held_out, "data/held_out.jsonl"),
        *(
            NamedFile(f"models.{role}.path", model.path, f"models/{role}")
            for role, model in config.models.models_by_role.items()
            if model.path != INITIAL
        ),
        *(
            NamedFile(f"evaluation.datasets[{i}].path", d.path, f"data/evaluation-{d.name}.jsonl")
            for i, d in enumerate(config.evaluation.datasets)
        ),
    ]


def _name_source(path: str) -> str:
    """Return the name of a source of rows: the last part of its path or Hub id."""
    return re.sub(r"[^\w.-]+", "_", PurePath(path).stem)


def replace_paths(config: JobConfig, path_of: Callable[[NamedFile], str]) -> JobConfig:
    """Return the job with another path for each file that it names."""
    document = config.to_document()
    for file in list_named_files(config):
        if file.path:
            set_value(document, file.key, path_of(file))
    return JobConfig.from_document(document)


def set_value(document: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key, which may be of a table in a list."""
    *tables, last = re.findall(r"\w+", key)
    table: Any = document
    for name in tables:
        table = table[int(name) if name.isdigit() else name]
    table[last] = value
