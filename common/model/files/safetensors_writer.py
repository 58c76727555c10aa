"""Writes a safetensors file tensor by tensor, in any order: nobody has to hold all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshrl.common.base.digest import Hasher
from meshrl.common.model.files.tensor_source import count_bytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}  # by safetensors' names
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_ALIGNMENT = 8  # bytes of which the header is a multiple


class SafetensorsWriter:
    """A file that appears at `path` once all tensors of `outline` are in it; the bytes are those
    that `safetensors.torch.save_file` writes.
    """

    def __init__(
        self,
        path: Path,
        meta_tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Of `outline` only types and shapes are looked at; `about`: what else the file says.
        OSError when there is no room.
        """
        self._path, self._part_path = path, path.with_name(f"{path.name}.part")
        header: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
        places, end = dict[str, int](), 0
        wide_first = sorted(
            meta_tensors, key=lambda name: (-meta_tensors[name].element_size(), name)
        )
        for name in wide_first:
            tensor, places[name] = meta_tensors[name], end
            end += count_bytes(tensor)
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [places[name], end],
            }
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % HEADER_ALIGNMENT)
        self._file = self._part_path.open("wb")
        head = len(raw).to_bytes(8, "little") + raw
        self._file.write(head)
        # Of the bytes as they are given, while they come in the order in which they lie.
        self._hasher: Hasher | None = Hasher(head)
        self._hashed_bytes = len(head)
        self._pending_offsets = {name: 8 + len(raw) + place for name, place in places.items()}

    @property
    def pending_names(self) -> list[str]:
        """The tensors that are still to be put, in the order in which they lie in the file."""
        return list(self._pending_offsets)

    @property
    def digest(self) -> str:
        """The digest of all that was put, whatever a disk has made of it; empty unless it was put
        in `order`.
        """
        return "" if self._hasher is None else self._hasher.hexdigest()

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Writes one of the tensors, which has the type and shape of the outline's."""
        place = self._pending_offsets.pop(name)
        self._file.seek(place)
        if place != self._hashed_bytes:
            self._hasher = None
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().data
            self._file.write(content)
            if self._hasher is not None:
                self._hasher.update(content)
                self._hashed_bytes += len(content)

    def finish(self) -> None:
        """The file appears; ValueError when a tensor was not put."""
        self.close()
        if self._pending_offsets:
            raise ValueError(f"{self._path}: {next(iter(self._pending_offsets))} was not written")
        os.replace(self._part_path, self._path)

    def close(self) -> None:
        """Without `finish`, what was written stays beside `path`, under another name."""
        self._file.close()
