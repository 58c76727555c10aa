"""Makes the chunks of a version again from the model in a checkpoint's directory, one at a time:
what that holds are the same numbers, in other files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from common.api.weights import Manifest, Tensor
from common.job.bundle.job_data import JobData
from common.model.architecture.config import ModelConfig
from common.model.files.rows import StoredRows
from common.model.files.safetensors_file import DTYPES
from common.model.network.lora import is_adapter, load_adapter
from common.weights.layout.manifest import by_chunk
from common.weights.output import ADAPTER, BASE


class Rebuilding:
    """The contents of a version's chunks. It blocks."""

    def __init__(
        self, data: JobData, config: ModelConfig, manifest: Manifest, directory: Path
    ) -> None:
        """`directory`: of the version's checkpoint. ConfigError when it cannot be read."""
        self.chunks = by_chunk(manifest.tensors)
        like = {
            piece.name: torch.empty(piece.shape, dtype=DTYPES[piece.dtype], device="meta")
            for piece in manifest.tensors
            if is_adapter(piece.name)
        }
        self._adapters = load_adapter(directory / ADAPTER, config, like) if like else {}
        model = directory
        if like:  # beside the merged model, unless it is what the job was given
            own = directory / BASE
            model = own if own.is_dir() else data.bundle / data.config.model.path
        self._stored = StoredRows(model, config)

    def content(self, digest: str) -> memoryview:
        """What that chunk of the manifest should hold; another digest: it does not."""
        pieces = self.chunks[digest]
        found = torch.empty(max(p.offset + p.size for p in pieces), dtype=torch.uint8)
        for piece in pieces:
            into = found[piece.offset : piece.offset + piece.size]
            into.copy_(self._elements(piece).view(torch.uint8))
        return found.numpy().data

    def _elements(self, piece: Tensor) -> torch.Tensor:
        """Flat."""
        if piece.name in self._adapters:
            flat = self._adapters[piece.name].to(DTYPES[piece.dtype]).reshape(-1)
            return flat[piece.begin : piece.end].contiguous()
        shape, width = torch.Size(piece.shape), _width(piece.shape)
        first, last = piece.begin // width, -(-piece.end // width)
        rows = torch.empty(last - first, *shape[1:], dtype=DTYPES[piece.dtype])
        self._stored.fill(piece.name, shape, first, rows)
        return rows.reshape(-1)[piece.begin - first * width : piece.end - first * width]


def _width(shape: Sequence[int]) -> int:
    """Elements of a row."""
    return max(1, math.prod(shape[1:]))
