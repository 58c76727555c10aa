"""Puts what was saved back into the rows that somebody trains, however it was cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from meshrl.common.base.errors import Damaged
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.images import Image
from meshrl.common.weights.layout.laying import Part
from meshrl.common.weights.layout.manifest import Rows, itemsize
from meshrl.common.weights.receive import Receiver
from meshrl.services.trainer.rows.saved import MASTER, RowsMissing, SavedRows

Fill = Callable[[str, Part], None]  # puts a weight's rows where the part says


async def masters_of(
    mesh: Mesh, bulk: BulkClient, manifest: str, saved: SavedRows, own: Mapping[str, Part]
) -> Fill:
    """What puts masters into the rows of some weights: those that were saved beside the state,
    where another type is published, else those of the version. Damaged or NotFound when the store
    does not hold it as it was written, once all chunks were asked for, and RowsMissing where
    it holds fewer bits of a number than are trained.
    """
    wanted: dict[str, Rows | None] = {
        name: Rows(0, part.first, part.first + len(part.rows))
        for name, part in own.items()
        if part.rows.numel() and MASTER + name not in saved
    }
    image: Image | None = None
    if wanted:
        receiver = Receiver(mesh, bulk)
        for piece in (await receiver.manifest(manifest)).tensors:
            if piece.name in wanted and itemsize(piece) < own[piece.name].rows.element_size():
                what = f"version {manifest} has {piece.name} in {piece.dtype} alone"
                raise RowsMissing(f"{what}, and its masters were not saved")
        image = await receiver.receive(manifest, wanted, fresh=True)

    def fill(name: str, part: Part) -> None:
        if not part.rows.numel():
            return
        if MASTER + name in saved:
            saved.fill(MASTER + name, part)
        else:
            assert image is not None, "it has what was not saved beside the state"
            fill_from(image, name, part)

    return fill


@torch.no_grad()
def fill_from(image: Image, name: str, part: Part) -> None:
    """Puts the rows of a tensor of an image into a part; Damaged without all of them."""
    flat, width = part.rows.view(-1), math.prod(part.shape[1:])
    low, done = part.first * width, 0
    for piece in image.pieces(name):
        begin, end = max(piece.begin, low), min(piece.end, low + len(flat))
        if begin < end and piece.dim == 0:
            found = piece.content.view(-1)[begin - piece.begin : end - piece.begin]
            flat[begin - low : end - low].copy_(found)
            done += end - begin
    if done != len(flat):
        raise Damaged(f"version {image.digest} has not all rows of {name}")
