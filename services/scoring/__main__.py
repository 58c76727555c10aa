"""The entry of the process that hosts a job's frozen models: the role process of a scoring gang."""

from __future__ import annotations

import argparse

from common.runtime.mesh import run
from services.scoring.running import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    arguments = parser.parse_args()
    run(lambda: main(arguments.gang, arguments.job, arguments.epoch))
