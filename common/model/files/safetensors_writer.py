"""Writer of a safetensors file tensor by tensor, in any order and without all of them in memory."""

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
}  # dtypes by safetensors' names
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_ALIGNMENT = 8  # alignment of the header in bytes


def lay_out_file(
    meta_tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file, and the offset of each tensor in it, in file order.

    Of `meta_tensors` only dtypes and shapes are used.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
    places, end = dict[str, int](), 0
    for name in sorted(meta_tensors, key=lambda name: (-meta_tensors[name].element_size(), name)):
        tensor, places[name] = meta_tensors[name], end
        end += count_bytes(tensor)
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [places[name], end],
        }
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % HEADER_ALIGNMENT)
    head = len(raw).to_bytes(8, "little") + raw
    return head, {name: len(head) + place for name, place in places.items()}


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor with elements, copied only if it is elsewhere or in pieces."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content


class SafetensorsWriter:
    """File that is installed at `path` once all tensors of `meta_tensors` are written.

    The bytes are those that `safetensors.torch.save_file` writes.
    """

    def __init__(
        self,
        path: Path,
        meta_tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Create the file; `metadata` is the file's metadata. Raise OSError if there is no disk
        space.

        Of `meta_tensors` only dtypes and shapes are used.
        """
        self._path, self._part_path = path, path.with_name(f"{path.name}.part")
        head, self._pending_offsets = lay_out_file(meta_tensors, metadata)
        self._file = self._part_path.open("wb")
        self._file.write(head)
        # Digest of the written bytes, as long as they arrive in file order.
        self._hasher: Hasher | None = Hasher(head)
        self._hashed_bytes = len(head)

    @property
    def pending_names(self) -> list[str]:
        """Tensors that are still to be written, in the order of the file."""
        return list(self._pending_offsets)

    @property
    def digest(self) -> str:
        """Digest of the written bytes, independent of the disk; empty if written out of order."""
        return "" if self._hasher is None else self._hasher.hexdigest()

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, with the dtype and shape of its meta tensor."""
        place = self._pending_offsets.pop(name)
        self._file.seek(place)
        if place != self._hashed_bytes:
            self._hasher = None
        if tensor.numel():
            content = view_bytes(tensor)
            self._file.write(content)
            if self._hasher is not None:
                self._hasher.update(content)
                self._hashed_bytes += len(content)

    def finish(self) -> None:
        """Install the file; raise ValueError if a tensor was not written."""
        self.close()
        if self._pending_offsets:
            raise ValueError(f"{self._path}: {next(iter(self._pending_offsets))} was not written")
        os.replace(self._part_path, self._path)

    def close(self) -> None:
        """Close the writer; without `finish`, the partial file stays beside `path`."""
        self._file.close()
