"""Compiles all native libraries of a CPU for all kinds of processor: `python -m kernels FOLDER`."""

import sys
from pathlib import Path

from kernels import build

if __name__ == "__main__":
    build.for_all_kinds(Path(sys.argv[1]))
