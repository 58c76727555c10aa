"""Foreground root process for tests, which follows logs until its input ends."""

from __future__ import annotations

import sys
from pathlib import Path

from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.console import log_printer

if __name__ == "__main__":
    place = MeshPaths(Path(sys.argv[1]))
    log_printer.start_printing(place, "launcher")
    print("it begins")
    sys.stdin.read()
    with place.log_path("weights").open("a") as log:
        log.write("its last word")
    sys.exit("error: it has given up")
