"""The entry of an engine process: the role process of a worker in the rollout role."""

from __future__ import annotations

import argparse

from common.runtime.mesh import run
from services.engine.running import main


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--gang", required=True)
    found.add_argument("--job", required=True)
    found.add_argument("--epoch", type=int, required=True)
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
