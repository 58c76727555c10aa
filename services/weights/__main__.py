"""The entry of the weight store's process."""

from __future__ import annotations

from pathlib import Path

from common.runtime.mesh import Mesh, MeshSettings, run
from common.wire.bulk import BulkServer, ChunkStore, bulk_key
from common.wire.weight_store import STORE
from services.weights.store import WeightStore


async def main() -> None:
    await serve(await Mesh.open(STORE, "weights", MeshSettings.from_env()))


async def serve(mesh: Mesh) -> None:
    """The life of the store, until it is cancelled."""
    settings = mesh.settings
    chunks = ChunkStore(Path(settings.run_root) / "store", mesh.clock.wall)
    key = bulk_key(settings)
    bulk = BulkServer(chunks, mesh.host, settings.bind, settings.advertise, key=key)
    actor = WeightStore(mesh, chunks)
    await mesh.join(actor, stats=actor.stats, bulk_address=bulk.address)
    try:
        await actor.sweep_forever()
    finally:
        bulk.close()
        await mesh.leave()


if __name__ == "__main__":
    run(main)
