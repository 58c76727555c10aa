"""The entry of the weight store's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrl.common.api.weights import STORE
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.common.mesh.runtime.tasks import all_of
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.bulk.port import serve as serve_chunks
from meshrl.services.weights.copying import Copying
from meshrl.services.weights.keeping.sweeping import SweepPace
from meshrl.services.weights.store import WeightStore
from meshrl.services.weights.version_copies import VersionCopies


async def main() -> None:
    await serve(await Mesh.open(STORE, "weights", MeshSettings.from_env()))


async def serve(mesh: Mesh, pace: SweepPace = SweepPace()) -> None:  # noqa: B008 (it does not change)
    settings = mesh.settings
    chunks = ChunkStore(Path(settings.run_root) / "store", mesh.clock.wall)
    bulk = serve_chunks(mesh, chunks)
    actor = WeightStore(mesh, chunks, pace=pace)
    copying = Copying(mesh)
    copies = VersionCopies(mesh, actor.records, chunks.directory)

    def stats() -> dict[str, Any]:
        own = actor.stats() | {"bulk_sent": bulk.sent}
        return own | copying.stats() | copies.stats()

    await mesh.join(actor, stats=stats, bulk_address=bulk.address)
    try:
        await all_of([actor.sweep_forever(), copying.forever(), copies.forever()])
    finally:
        bulk.close()
        await mesh.leave()


if __name__ == "__main__":
    run(main)
