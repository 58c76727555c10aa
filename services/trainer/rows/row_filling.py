"""Restores saved weights into the rows that a rank trains, for any layout of the saved rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from meshrl.common.base.errors import CorruptData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.chunk_builder import TensorRows
from meshrl.common.weights.layout.manifest import RowRange, get_element_bytes
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.services.trainer.rows.saved_rows import MASTER_PREFIX, RowsMissing, SavedRows

FillRows = Callable[[str, TensorRows], None]  # fills a part of a weight


async def make_row_filler(
    mesh: Mesh,
    bulk: BulkClient,
    manifest: str,
    saved: SavedRows,
    own_rows: Mapping[str, TensorRows],
) -> FillRows:
    """Return a function that fills weights' rows with masters.

    Masters come from the saved state if another dtype is published, else from the version.

    Raises:
        CorruptData, NotFound: The store lacks intact chunks, after a request for all of them.
        RowsMissing: The version has fewer bits per number than are trained.
    """
    missing_rows: dict[str, RowRange | None] = {
        name: RowRange(0, part.first_row, part.first_row + len(part.rows))
        for name, part in own_rows.items()
        if part.rows.numel() and MASTER_PREFIX + name not in saved
    }
    image: VersionImage | None = None
    if missing_rows:
        receiver = WeightReceiver(mesh, bulk)
        for piece in (await receiver.fetch_manifest(manifest)).tensors:
            if (
                piece.name in missing_rows
                and get_element_bytes(piece) < own_rows[piece.name].rows.element_size()
            ):
                what = f"version {manifest} has {piece.name} only in {piece.dtype}"
                raise RowsMissing(f"{what}, and its masters were not saved")
        image = await receiver.receive(manifest, missing_rows, rehash=True)

    def fill(name: str, part: TensorRows) -> None:
        if not part.rows.numel():
            return
        if MASTER_PREFIX + name in saved:
            saved.fill(MASTER_PREFIX + name, part)
        else:
            assert image is not None, (
                "the version holds the rows that were not saved with the state"
            )
            fill_from_image(image, name, part)

    return fill


@torch.no_grad()
def fill_from_image(image: VersionImage, name: str, target_rows: TensorRows) -> None:
    """Fill a part with its rows of a tensor of an image; CorruptData without all of them."""
    flat, width = target_rows.rows.view(-1), math.prod(target_rows.shape[1:])
    low, done = target_rows.first_row * width, 0
    for piece in image.tensor_ranges(name):
        begin, end = max(piece.begin, low), min(piece.end, low + len(flat))
        if begin < end and piece.dim == 0:
            found = piece.elements.view(-1)[begin - piece.begin : end - piece.begin]
            flat[begin - low : end - low].copy_(found)
            done += end - begin
    if done != len(flat):
        raise CorruptData(f"version {image.digest} lacks rows of {name}")
