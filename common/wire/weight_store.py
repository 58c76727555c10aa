"""A client of the weight store's bulk port: writes and reads finished groups and chunks of
weights.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path

from common.api.weights import Examine, Weights
from common.errors import Damaged, PeerLost
from common.records import damage
from common.runtime.mesh import Mesh
from common.runtime.patience import NotThere, patiently
from common.state import events, registry
from common.wire.bulk import BulkClient

STORE = "weights"  # its name in the registry
WHY = "it is not what its name says"  # what is told of a damaged chunk


async def store_entry(mesh: Mesh) -> registry.Entry:
    """The weight store's entry; NotThere while it has no live lease."""
    entry = await registry.lookup(mesh.state, STORE)
    if entry is None or not entry.alive:
        raise NotThere("the weight store has no live lease", fix="it is being restarted")
    return entry


async def put(mesh: Mesh, bulk: BulkClient, content: bytes | memoryview, what: str) -> str:
    """Writes bytes durably, waiting for the store if need be; their digest."""

    async def once() -> str:
        return await bulk.put(await store_entry(mesh), content)

    with mesh.wait(what, on=STORE):
        digest = await patiently(mesh.clock, once)
        await tell(mesh, bulk.untold)
    return digest


async def tell(mesh: Mesh, untold: deque[tuple[Path, Path]]) -> None:
    """Tells of chunks that a writer has found damaged, and written again."""
    while untold:
        path, aside = untold[0]
        told = damage.fields("weights", path, WHY, "it is written again", aside=aside)
        await patiently(mesh.clock, partial(events.append, mesh.state, damage.EVENT, told))
        untold.popleft()


async def get(
    mesh: Mesh, bulk: BulkClient, digest: str, what: str, *, job: str = "", kind: str = "weights"
) -> bytes:
    """The bytes of a digest, once the store is there; NotFound when it does not hold them, Damaged
    when they are not what was written. The store has set them aside then, and told of it as of a
    file of the job and of a `kind` of `common.records.damage`.
    """

    async def once() -> bytes:
        try:
            return await bulk.get(await store_entry(mesh), digest)
        except Damaged:
            examined = await mesh.ref(STORE).call(Weights.examine, Examine(digest, kind, job))
            if examined.whole:  # it was changed on its way
                raise PeerLost(f"chunk {digest} arrived changed", where=STORE) from None
            raise

    with mesh.wait(what, on=STORE):
        return await patiently(mesh.clock, once)
