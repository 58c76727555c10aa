"""Training process that sleeps after each step: in memory, on disk, and from one to the other.

`--marks DIRECTORY [--die TIER@STEP ...]` precede the arguments of meshrl.services.trainer. Each
sleep, each death asleep (or once it is absent) and each start, with or without retained state,
leaves a file there.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.role import SetTier
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.core.core_sleep import CoreSleeper

WAY = ("memory", "accelerator", "disk", "accelerator", "memory", "disk", "memory", "accelerator")
stepped, began, resumed = TrainerCore._run_step, TrainerCore.begin, CoreSleeper.try_resume


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--die", nargs="*", default=[])
    own, rest = parser.parse_known_args()

    async def step_and_sleep(self: TrainerCore, step: int) -> None:
        await stepped(self, step)
        segments, files = self.mesh.settings.offload_targets
        for tier in WAY:
            wish = SetTier(tier, self.tiers.epoch + 1, False, segments, files)
            await self.tiers.set_tier(wish)
            (own.marks / f"slept-{step}-{self.tiers.epoch}").touch()
            dies(f"{tier}@{step}")
        if f"absent@{step}" in own.die and not (own.marks / f"died-absent@{step}").exists():
            await self.tiers.set_tier(
                SetTier("absent", self.tiers.epoch + 1, False, segments, files)
            )
            dies(f"absent@{step}")

    def dies(where: str) -> None:
        died = own.marks / f"died-{where}"
        if where in own.die and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def begin(self: TrainerCore) -> None:
        await began(self)
        (own.marks / f"began-{self.position.version}-covered-{self.checkpoints.last_step}").touch()

    async def resume(self: CoreSleeper, row: Any) -> bool:
        found = await resumed(self, row)
        if found:
            (own.marks / f"resumed-{row.version}").touch()
        return found

    TrainerCore._run_step = step_and_sleep  # type: ignore[method-assign]
    TrainerCore.begin = begin  # type: ignore[method-assign]
    CoreSleeper.try_resume = resume  # type: ignore[method-assign]
    sys.argv = ["meshrl.services.trainer", *rest]
    runpy.run_module("meshrl.services.trainer", run_name="__main__")


if __name__ == "__main__":
    main()
