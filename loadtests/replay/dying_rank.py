"""Training process that gets SIGKILL as it enters given phases of given steps, once in each.

`--die PHASE@STEP ... --marks DIRECTORY` precede the arguments of meshrl.services.trainer. Each
death leaves a file there, so that the next start survives that phase.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path

from meshrl.services.trainer.core.core import TrainerCore

entered = TrainerCore.enter_phase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--die", nargs="+", required=True)
    parser.add_argument("--marks", type=Path, required=True)
    own, rest = parser.parse_known_args()

    def enter(self: TrainerCore, phase: str, step: int) -> None:
        entered(self, phase, step)
        mark = own.marks / f"{phase}@{step}"
        if self.is_ready and mark.name in own.die and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    TrainerCore.enter_phase = enter  # type: ignore[method-assign]
    sys.argv = ["meshrl.services.trainer", *rest]
    runpy.run_module("meshrl.services.trainer", run_name="__main__")


if __name__ == "__main__":
    main()
