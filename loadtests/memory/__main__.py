"""Benchmark of the estimated memory of tiny models' processes against measured peaks.

Usage:

    OMP_NUM_THREADS=1 python -m loadtests.memory

Prints for each case the bytes that `--dry-run` estimates, the measured peak, and their ratio. Ranks
are forks that meet over gloo. Peaks of training are bytes of PyTorch's allocator; those of engines
are resident memory of a process above that before the engine was built.
"""

from __future__ import annotations

from loadtests.measuring.entry import options, report
from loadtests.memory.cases import CASES


def main() -> None:
    parser = options(__doc__, cases=list(CASES))
    chosen = parser.parse_args().cases
    figures = {}
    for name in chosen:
        figures[name] = CASES[name]()
        print(name, figures[name], flush=True)
    worst = max(abs(one["ratio"] - 1) for one in figures.values())
    report(figures | {"worst": round(worst, 3)})


if __name__ == "__main__":
    main()
