"""Compiles all native libraries of a CPU for all kinds of processor: `python -m meshrl.kernels
FOLDER`."""

import sys
from pathlib import Path

from meshrl.kernels import build

if __name__ == "__main__":
    build.for_all_kinds(Path(sys.argv[1]))
