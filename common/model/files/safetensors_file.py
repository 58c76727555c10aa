"""Writes a safetensors file tensor by tensor, in any order: nobody has to hold all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshrl.common.base.digest import Hasher
from meshrl.common.model.files.source import nbytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}  # by safetensors' names
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNED = 8  # bytes of which the header is a multiple


class Unfinished:
    """A file that appears at `path` once all tensors of `outline` are in it; the bytes are those
    that `safetensors.torch.save_file` writes.
    """

    def __init__(
        self, path: Path, outline: Mapping[str, Tensor], about: Mapping[str, str] | None = None
    ) -> None:
        """Of `outline` only types and shapes are looked at; `about`: what else the file says.
        OSError when there is no room.
        """
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        header: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(about or {})}
        places, end = dict[str, int](), 0
        wide_first = sorted(outline, key=lambda name: (-outline[name].element_size(), name))
        for name in wide_first:
            tensor, places[name] = outline[name], end
            end += nbytes(tensor)
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [places[name], end],
            }
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % ALIGNED)
        self._file = self._part.open("wb")
        head = len(raw).to_bytes(8, "little") + raw
        self._file.write(head)
        # Of the bytes as they are given, while they come in the order in which they lie.
        self._hashed: Hasher | None = Hasher(head)
        self._hashed_to = len(head)
        self._places = {name: 8 + len(raw) + place for name, place in places.items()}

    @property
    def order(self) -> list[str]:
        """The tensors that are still to be put, in the order in which they lie in the file."""
        return list(self._places)

    @property
    def digest(self) -> str:
        """The digest of all that was put, whatever a disk has made of it; empty unless it was put
        in `order`.
        """
        return "" if self._hashed is None else self._hashed.hexdigest()

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes one of the tensors, which has the type and shape of the outline's."""
        place = self._places.pop(name)
        self._file.seek(place)
        if place != self._hashed_to:
            self._hashed = None
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().data
            self._file.write(content)
            if self._hashed is not None:
                self._hashed.update(content)
                self._hashed_to += len(content)

    def finish(self) -> None:
        """The file appears; ValueError when a tensor was not put."""
        self.close()
        if self._places:
            raise ValueError(f"{self._path}: {next(iter(self._places))} was not written")
        os.replace(self._part, self._path)

    def close(self) -> None:
        """Without `finish`, what was written stays beside `path`, under another name."""
        self._file.close()
