"""A root process that stays in the foreground, for tests: it follows logs until its input ends."""

from __future__ import annotations

import sys
from pathlib import Path

from meshrl.directory.places import MeshPlace
from meshrl.launch.console import console

if __name__ == "__main__":
    place = MeshPlace(Path(sys.argv[1]))
    console.begin(place, "launcher")
    print("it begins")
    sys.stdin.read()
    with place.log("weights").open("a") as log:
        log.write("its last word")
    sys.exit("error: it has given up")
