"""Runs a module of Python in the network of another process.

    python -m loadtests.weights.members.within PID MODULE WORDS...

PID 0: in its own.
"""

from __future__ import annotations

import runpy
import sys

from loadtests.weights.network import enter


def main() -> None:
    pid, module, *words = sys.argv[1:]
    if int(pid):
        enter(int(pid))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
