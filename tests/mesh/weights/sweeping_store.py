"""The weight store, which is swept all the time, and gives what it needs no more no grace.

Takes what meshrl.services.weights takes.
"""

from __future__ import annotations

from meshrl.common.api.weights import STORE
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.services.weights.__main__ import serve
from meshrl.services.weights.keeping.sweeping import SweepPace

AT_ONCE = SweepPace(sweep_s=0.05, grace_s=0.0)


async def main() -> None:
    await serve(await Mesh.open(STORE, "weights", MeshSettings.from_env()), AT_ONCE)


if __name__ == "__main__":
    run(main)
