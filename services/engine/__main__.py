"""The entry of an engine process: the role process of a worker in the rollout role."""

from __future__ import annotations

import argparse

from common.runtime.mesh import run
from services.engine.running import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    arguments = parser.parse_args()
    run(lambda: main(arguments.gang, arguments.job, arguments.epoch))
