"""Compiler of all CPU libraries for all kinds of processor: `python -m meshrl.kernels FOLDER`."""

import sys
from pathlib import Path

from meshrl.kernels import library_build

if __name__ == "__main__":
    library_build.build_for_all_processors(Path(sys.argv[1]))
