"""File of rows in one of the formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from meshrl.job.row_files import arrow_formats, text_formats
from meshrl.job.row_files.dataset_row import DatasetRow

READERS = text_formats.READERS | arrow_formats.READERS  # by the suffix of a file


@dataclass(frozen=True)
class RowFile:
    """File of rows, and its name in messages."""

    path: Path
    name: str
    suffix: str  # of its format

    @classmethod
    def from_path(cls, path: Path, name: str = "") -> RowFile:
        """Return a file whose suffix names its format; `name` defaults to the path."""
        return cls(path, name or str(path), get_format_suffix(path))

    def read(self) -> Iterator[DatasetRow]:
        """Yield the rows; a file of an unknown suffix has an object on each line."""
        return READERS.get(self.suffix, text_formats.read_jsonl)(self.path, self.name)


def get_format_suffix(path: PurePath) -> str:
    """Return the suffix of a file's format, without that of its compression."""
    return PurePath(path.name.removesuffix(text_formats.COMPRESSED_SUFFIX)).suffix
