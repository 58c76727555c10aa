"""Saved state of a step beside the version's files, readable by rows.

The state is one safetensors file per writer, each with that writer's rows. A gang of another size
can read it. So can `torch.distributed.checkpoint`: the files describe the place of their rows as
its own do.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshrl.common.base.errors import CorruptData, StorageFull
from meshrl.common.base.files.disk_sync import fsync_path
from meshrl.common.model.files.safetensors_writer import DTYPES, SafetensorsWriter
from meshrl.common.model.files.tensor_storages import alias_for_numpy
from meshrl.common.weights.layout.chunk_builder import TensorRows

MASTER_PREFIX = "master."  # prefix of float32 masters' names, where another dtype is published
FIRST_FILE = "part-00000-00000.safetensors"
_FILE_PATTERN = re.compile(r"part-([0-9]{5})-[0-9]{5,}\.safetensors")
BLOCK_BYTES = 16 << 20  # in memory while rows are read
_OFFSETS, _SHARDS = "saved_offsets", "DCP_SHARDING_INFO"  # torch.distributed.checkpoint's names
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RowsMissing(CorruptData):
    """Error raised when saved files, intact or not, lack rows that the caller needs."""

    code = "rows_missing"


def save_rows(path: Path, name: str, rows: Mapping[str, TensorRows]) -> str:
    """Write rows to a file below `path` and return its digest; StorageFull without disk space.

    The file is durable once `sync_files` has returned.
    """
    offsets = {n: {_OFFSETS: [p.first_row, 0, 0, 0, 0][: p.rows.dim()]} for n, p in rows.items()}
    try:
        path.mkdir(parents=True, exist_ok=True)
        outline = {name: part.rows for name, part in rows.items()}
        file = SafetensorsWriter(
            path / name, outline, {_SHARDS: json.dumps(offsets), "DCP_VERSION": "1"}
        )
        try:
            for tensor in file.pending_names:
                host_tensor = outline[tensor].cpu().contiguous()
                file.write_tensor(tensor, alias_for_numpy(host_tensor))
            file.finish()
            return file.digest
        finally:
            file.close()
    except OSError as error:
        if error.errno in _FULL_ERRNOS:
            fix = "Free disk space; the write is retried"
            raise StorageFull("no disk space for a checkpoint", where=str(path), fix=fix) from error
        raise


def sync_files(path: Path) -> None:
    """Make all files below `path` durable."""
    for file in [*path.iterdir(), path]:
        fsync_path(file)


def select_rank_files(paths: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Return the state's files with a rank's rows; empty if another number of ranks wrote it."""
    writers: dict[int, list[str]] = {}
    for path in paths:
        if (found := _FILE_PATTERN.fullmatch(Path(path).name)) is not None:
            writers.setdefault(int(found[1]), []).append(path)
    if writers.keys() != set(range(ranks)):
        return []
    return sorted(path for writer in {0, rank} for path in writers[writer])


@dataclass(frozen=True)
class _SavedTensor:
    file: Path
    offset_bytes: int  # of their bytes in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_count(self) -> int:
        return self.shape[0] if self.shape else 1


class SavedRows:
    """State that any number of ranks wrote below a directory; each header is read once."""

    def __init__(self, path: Path) -> None:
        """Read the headers; raise CorruptData if a file has none."""
        self._path = path
        self._rows: dict[str, list[_SavedTensor]] = {}
        for file in sorted(path.glob("*.safetensors")):
            for name, rows in _read_header(file).items():
                self._rows.setdefault(name, []).append(rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    @torch.no_grad()
    def fill(self, name: str, target_rows: TensorRows) -> None:
        """Fill a part with its rows of a tensor; RowsMissing without all of them."""
        if not target_rows.rows.numel():
            return
        target = target_rows.rows if target_rows.rows.dim() else target_rows.rows.reshape(1)
        done = 0
        for rows in sorted(self._rows.get(name, ()), key=lambda rows: rows.first_row):
            if rows.first_row > target_rows.first_row + done:
                break  # the rows before them are missing
            low = max(rows.first_row, target_rows.first_row + done)
            high = min(rows.first_row + rows.row_count, target_rows.first_row + len(target))
            if low < high and rows.row_numel == target[0].numel():
                _read_rows(
                    rows,
                    low - rows.first_row,
                    target[low - target_rows.first_row : high - target_rows.first_row],
                )
                done = high - target_rows.first_row
        if done != len(target):
            missing = (
                f"rows {target_rows.first_row} to {target_rows.first_row + len(target)} of "
                f"{name} are incomplete"
            )
            raise RowsMissing(missing, where=str(self._path))


def _read_header(file: Path) -> dict[str, _SavedTensor]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        offsets = json.loads(header.pop("__metadata__", {}).get(_SHARDS, "{}"))
        found = {}
        for name, about in header.items():
            firsts = offsets.get(name, {}).get(_OFFSETS, ())
            if any(firsts[1:]):
                raise ValueError(f"{name} is not divided by rows")
            first, begin = (firsts[0] if firsts else 0), 8 + size + about["data_offsets"][0]
            shape = tuple(about["shape"])
            found[name] = _SavedTensor(file, begin, DTYPES[about["dtype"]], shape, first)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(f"a state file cannot be read: {error!r}", where=str(file)) from error


def _read_rows(rows: _SavedTensor, first: int, into: Tensor) -> None:
    """Read the file's rows from index `first` on."""
    width, item = max(1, rows.row_numel), rows.dtype.itemsize
    max_rows = max(1, BLOCK_BYTES // (width * item))
    with rows.file.open("rb", buffering=0) as file:
        file.seek(rows.offset_bytes + first * width * item)
        for start in range(0, len(into), max_rows):
            target = into[start : start + max_rows]
            found = torch.empty(target.shape, dtype=rows.dtype)
            raw = found.reshape(-1).view(torch.uint8).numpy().data
            if file.readinto(raw) != len(raw):
                raise CorruptData("a state file is truncated", where=str(rows.file))
            target.copy_(found)
