"""Check of a host with a GPU: kernels, decoding, training, sleep, two instances, a recipe, SGLang.

Usage:

    python -m loadtests.gpu --json gpu.json --markdown gpu.md
    python -m loadtests.gpu --only kernels,decoding
    python -m loadtests.gpu --cpu

It needs torch, numpy, safetensors, msgpack and xxhash, but no network, Redis or pyzmq. Each
case has a deadline and runs in a process that may fail alone. Exit status: 0, no case
failed; 1, some failed; 2, there is no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtests.gpu.case_runner import FAILED, CaseRunner, Outcome
from loadtests.gpu.plan import CASES, PARTS, TOTAL_S, Case, NoGpu, Settings
from loadtests.gpu.result_table import describe, format_table, nest_figures
from loadtests.measuring.entry import arms_of, options, print_progress, report

SGLANG_ENV = "MESHRL_SGLANG_PYTHON"
NO_GPU_STATUS = 2


def main() -> int:
    parser = options(
        __doc__,
        cpu=(False, "tiny sizes on a CPU"),
        only=(str, f"parts, with commas: {', '.join(PARTS)}; none: all"),
        seconds=(TOTAL_S, "time of all cases"),
        json=(Path, "file for the figures"),
        markdown=(Path, "file for the table"),
        sglang_python=(os.environ.get(SGLANG_ENV, ""), f"interpreter with SGLang; ${SGLANG_ENV}"),
    )
    chosen = parser.parse_args()
    parts = arms_of(parser, chosen.only, list(PARTS)) if chosen.only else list(PARTS)
    settings = Settings("cpu" if chosen.cpu else "cuda", chosen.sglang_python)
    outcomes = run_cases(settings, [case for case in CASES if case.part in parts], chosen.seconds)
    print(format_table(outcomes), flush=True)
    if chosen.markdown:
        chosen.markdown.write_text(format_table(outcomes) + "\n")
    figures = nest_figures(outcomes)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    report(figures)
    return int(any(outcome.state == FAILED for outcome in outcomes))


def run_cases(settings: Settings, cases: Sequence[Case], total_s: float) -> list[Outcome]:
    """Run the cases and print each when it is over; exit if there is no GPU."""
    outcomes = []
    runner = CaseRunner(settings, total_s)
    for outcome in runner.run([CASES[0], *(case for case in cases if case != CASES[0])]):
        outcomes.append(outcome)
        label = f"{outcome.case.part}.{outcome.case.name}"
        print_progress(f"{label} {outcome.state} in {outcome.seconds:.1f} s: {describe(outcome)}")
        if outcome.reason.startswith(NoGpu.__name__):
            print_progress("no case can run here; --cpu runs all with tiny sizes")
            sys.exit(NO_GPU_STATUS)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
