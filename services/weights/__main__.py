"""Entry point of the weight store's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrl.common.api.weights import STORE_NAME
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.bulk.port import serve_chunks as serve_chunks
from meshrl.services.weights.durable_copier import DurableCopier
from meshrl.services.weights.retention.sweeper import SweepSettings
from meshrl.services.weights.store import WeightStore
from meshrl.services.weights.version_copies import VersionCopier


async def main() -> None:
    await run_store(await Mesh.open(STORE_NAME, "weights", MeshSettings.from_env()))


async def run_store(mesh: Mesh, sweep_settings: SweepSettings = SweepSettings()) -> None:  # noqa: B008 (it does not change)
    settings = mesh.settings
    chunks = ChunkStore(Path(settings.run_root) / "store", mesh.clock.wall)
    bulk = serve_chunks(mesh, chunks)
    actor = WeightStore(mesh, chunks, sweep_settings=sweep_settings)
    copying = DurableCopier(mesh)
    copies = VersionCopier(mesh, actor.job_records, chunks.directory)

    def stats() -> dict[str, Any]:
        own = actor.stats() | {"bulk_sent": bulk.sent_bytes}
        return own | copying.stats() | copies.stats()

    await mesh.join(actor, stats=stats, bulk_address=bulk.address)
    try:
        await run_all([actor.run_sweeper(), copying.run(), copies.run()])
    finally:
        bulk.close()
        await mesh.leave()


if __name__ == "__main__":
    run_service(main)
