"""Part of the GPU check that starts a server of its own: weights, tokens and sleep on a CPU."""

from __future__ import annotations

import json

import pytest

from loadtests.gpu.plan import PARTS, TOTAL_S
from tests.load import scaled
from tests.sglang.interpreter import python
from tests.unit.loadtests.test_gpu import run_program

pytestmark = pytest.mark.deep


def test_gpu_check_measures_a_server_with_each_transport_of_a_cpu() -> None:
    words = "--cpu", "--only", "sglang", "--seconds", str(scaled(TOTAL_S))
    run = run_program("loadtests.gpu", *words, "--sglang-python", str(python()))
    assert run.returncode == 0, run.stderr[-4000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    assert [reason.split(":")[0] for reason in figures["skipped"]] == ["sglang.weights_ipc"]
    for case in PARTS["sglang"].keys() - {"weights_ipc"}:
        assert any(name.startswith(f"sglang_{case}_") for name in figures)
