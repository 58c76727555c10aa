"""Weight store that sweeps continuously and without a grace period.

It takes the arguments of meshrl.services.weights.
"""

from __future__ import annotations

from meshrl.common.api.weights import STORE_NAME
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.services.weights.__main__ import run_store
from meshrl.services.weights.retention.sweeper import SweepSettings

AT_ONCE = SweepSettings(interval_s=0.05, grace_s=0.0)


async def main() -> None:
    await run_store(await Mesh.open(STORE_NAME, "weights", MeshSettings.from_env()), AT_ONCE)


if __name__ == "__main__":
    run_service(main)
