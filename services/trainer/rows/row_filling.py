"""Puts what was saved back into the rows that somebody trains, however it was cut."""

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

FillRows = Callable[[str, TensorRows], None]  # puts a weight's rows where the part says


async def make_row_filler(
    mesh: Mesh,
    bulk: BulkClient,
    manifest: str,
    saved: SavedRows,
    own_rows: Mapping[str, TensorRows],
) -> FillRows:
    """What puts masters into the rows of some weights: those that were saved beside the state,
    where another type is published, else those of the version. Damaged or NotFound when the store
    does not hold it as it was written, once all chunks were asked for, and RowsMissing where
    it holds fewer bits of a number than are trained.
    """
    wanted: dict[str, RowRange | None] = {
        name: RowRange(0, part.first_row, part.first_row + len(part.rows))
        for name, part in own_rows.items()
        if part.rows.numel() and MASTER_PREFIX + name not in saved
    }
    image: VersionImage | None = None
    if wanted:
        receiver = WeightReceiver(mesh, bulk)
        for piece in (await receiver.fetch_manifest(manifest)).tensors:
            if (
                piece.name in wanted
                and get_element_bytes(piece) < own_rows[piece.name].rows.element_size()
            ):
                what = f"version {manifest} has {piece.name} in {piece.dtype} alone"
                raise RowsMissing(f"{what}, and its masters were not saved")
        image = await receiver.receive(manifest, wanted, rehash=True)

    def fill(name: str, part: TensorRows) -> None:
        if not part.rows.numel():
            return
        if MASTER_PREFIX + name in saved:
            saved.fill(MASTER_PREFIX + name, part)
        else:
            assert image is not None, "it has what was not saved beside the state"
            fill_from_image(image, name, part)

    return fill


@torch.no_grad()
def fill_from_image(image: VersionImage, name: str, target_rows: TensorRows) -> None:
    """Puts the rows of a tensor of an image into a part; Damaged without all of them."""
    flat, width = target_rows.rows.view(-1), math.prod(target_rows.shape[1:])
    low, done = target_rows.first_row * width, 0
    for piece in image.tensor_ranges(name):
        begin, end = max(piece.begin, low), min(piece.end, low + len(flat))
        if begin < end and piece.dim == 0:
            found = piece.elements.view(-1)[begin - piece.begin : end - piece.begin]
            flat[begin - low : end - low].copy_(found)
            done += end - begin
    if done != len(flat):
        raise CorruptData(f"version {image.digest} has not all rows of {name}")
