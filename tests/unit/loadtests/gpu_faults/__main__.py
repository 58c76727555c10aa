"""Program that runs all cases within some seconds and prints the outcome of each."""

from __future__ import annotations

import json
import sys

from loadtests.gpu.case_runner import CaseRunner
from loadtests.gpu.plan import Case, Settings
from tests.unit.loadtests.gpu_faults import faults, patient

if __name__ == "__main__":
    cases = [
        # the hung case gets a hundredth of the time, and each other case far more than it needs
        *(Case("faults", name, 1.0 if name == "hung" else 20.0) for name in faults.CASES),
        Case("unimportable", "any", 20.0),
        *(Case("patient", name, 20.0) for name in patient.CASES),
    ]
    runner = CaseRunner(Settings("cpu"), float(sys.argv[1]), __package__, preload=())
    for found in runner.run(cases):
        label = f"{found.case.part}.{found.case.name}"
        print(json.dumps([label, found.state, found.figures, found.reason]), flush=True)
