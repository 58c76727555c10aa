"""Benchmark of sharing: instances of several jobs on one gang.

Usage:

    python -m loadtests.sharing policies

- `policies`: the policies of time slices under virtual time, on `--cases` small random cases
  against every order (`*_over_oracle`: median ratio of the mean response time; `_p95`), and on
  `--workloads` longer ones: `*_makespan_ratio` to the default policy, `*_wait_p99_s`,
  `*_response_mean_s`, `*_switch_share`.

The last line is JSON.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from loadtests.measuring.entry import options, parts_of
from loadtests.sharing.policies import measure_policies


def run_policies(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    return measure_policies(chosen.cases, chosen.workloads, chosen.seed)


def main() -> None:
    parser = options(__doc__, cases=200, workloads=40, seed=0)
    parser.add_argument("parts", nargs="*", help="parts to run; all without any")
    parts_of(parser, parser.parse_args(), {"policies": run_policies})


if __name__ == "__main__":
    main()
