"""The entry of a training process: the core, a further rank of its gang, or a hybrid."""

from __future__ import annotations

import argparse

from common.runtime.mesh import run
from services.trainer.running import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--rank", type=int, default=0, help="in the core's gang")
    parser.add_argument("--ranks", type=int, default=1, help="of the core's gang")
    arguments = parser.parse_args()
    run(lambda: main(arguments))
