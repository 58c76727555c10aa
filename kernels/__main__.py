"""Compiler of libraries for other hosts: `python -m meshrl.kernels FOLDER [--cuda]`.

It compiles all CPU libraries for all kinds of processor; with `--cuda` the CUDA sources instead.
"""

import sys
from pathlib import Path

from meshrl.kernels import cuda_build, library_build

if __name__ == "__main__":
    if sys.argv[2:] == ["--cuda"]:
        cuda_build.build_for_all_gpus(Path(sys.argv[1]))
    else:
        library_build.build_for_all_processors(Path(sys.argv[1]))
