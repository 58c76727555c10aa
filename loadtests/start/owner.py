"""Owner of processes that never exits by itself: `python -m loadtests.start.owner COUNT SEED`.

It prints `begun`, starts COUNT processes that are hard to end (`brief.py`), prints `done`, and
waits.
"""

from __future__ import annotations

import asyncio
import random
import sys

from meshrl.common.mesh.process.host import SystemHost

IN_THE_WAY = ("wait", "stop", "hold")
LONG_S = 600.0


async def main(count: int, seed: int) -> None:
    host, chance = SystemHost(), random.Random(seed)
    print("begun", flush=True)
    kept = []
    for _ in range(count):
        how = chance.choice(IN_THE_WAY)
        kept.append(host.spawn([sys.executable, "-m", "loadtests.start.brief", how], name=how))
    print("done", flush=True)
    await asyncio.sleep(LONG_S)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
