"""The entry of a training process: the core, a further rank of its gang, or a hybrid."""

from __future__ import annotations

import argparse

from common.runtime.mesh import run
from services.trainer.running import main


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--gang", required=True)
    found.add_argument("--job", required=True)
    found.add_argument("--epoch", type=int, required=True)
    found.add_argument("--core", action="store_true")
    found.add_argument("--rank", type=int, default=0, help="in the core's gang")
    found.add_argument("--ranks", type=int, default=1, help="of the core's gang")
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
