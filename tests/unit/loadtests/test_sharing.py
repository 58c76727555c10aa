"""Cells of the colocated mode on the real mesh, and combined rounds of a shared gang."""

from __future__ import annotations

import json

import pytest

from loadtests.measuring.entry import report
from loadtests.paced.running import Arm
from loadtests.sharing.colocation import ACCELERATORS, RATIOS, list_modes, predict_rollout_s
from loadtests.sharing.real_colocation import (
    CELLS,
    STEP_S,
    build_real_workload,
    compute_settled_step_s,
    describe_choice,
    parse_cell,
)
from loadtests.sharing.shared_gang import combine_rounds
from meshrl.common.job.emulation import parse_training_speed


def test_cells_name_workers_ratio_and_staleness() -> None:
    cells = [parse_cell(name) for name in CELLS.split(",")]
    assert {(one.accelerators, one.ratio) for one in cells} == {
        (accelerators, ratio) for accelerators in ACCELERATORS for ratio in RATIOS
    }
    assert parse_cell("2:0.25:2").staleness == 2 and parse_cell("2:0.25").staleness == 0
    assert list_modes(parse_cell("1:4")) == ("always", "auto"), "one worker has no split"


@pytest.mark.parametrize("ratio", RATIOS)
def test_workload_of_a_cell_has_its_ratio_and_step(ratio: float) -> None:
    job = build_real_workload(parse_cell(f"2:{ratio}"), 8)
    rollout_s = predict_rollout_s(job)
    tokens_per_s = parse_training_speed(job.training_speed).tokens_per_s
    trained = tokens_per_s * rollout_s / ratio  # tokens of a step
    assert rollout_s * (1 + 1 / ratio) == pytest.approx(STEP_S, rel=0.01)
    assert trained == pytest.approx(24 * (12.0 * 1.083 + 3), rel=0.02)


def test_settled_step_and_choice_are_those_of_the_end() -> None:
    arm = Arm("auto", ends_s=[10.0, 20.0, 30.0, 32.0, 34.0])
    assert compute_settled_step_s(arm) == 2.0
    case = parse_cell("2:4")
    assert describe_choice(arm, case) == "split"
    arm.judged = [{"from": "split", "to": "colocated", "undone": False}]
    assert describe_choice(arm, case) == "colocated"
    arm.judged.append({"from": "colocated", "to": "split", "undone": True})
    assert describe_choice(arm, case) == "colocated"
    assert describe_choice(Arm("auto"), parse_cell("1:4")) == "colocated"


def test_rounds_are_combined_by_medians_and_the_worst_checks() -> None:
    rounds = [
        {"slowdown_max": 1.0, "valid": 1, "lost": 0, "invalid_runs": [], "switch_s_cold": None},
        {"slowdown_max": 9.0, "valid": 0, "lost": 1, "invalid_runs": ["cold"], "switch_s_cold": 2},
        {"slowdown_max": 2.0, "valid": 1, "lost": 1, "invalid_runs": ["fifo"], "switch_s_cold": 4},
    ]
    assert combine_rounds(rounds) == {
        "slowdown_max": 2.0,
        "valid": 0,
        "lost": 2,
        "invalid_runs": ["cold", "fifo"],
        "switch_s_cold": 3,
    }


def test_invalid_figures_come_first_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    report({"bit_equal": 1, "fifo_gang": {"valid": 0}, "valid": 0, "valid_cold": 1})
    printed = capsys.readouterr()
    assert list(json.loads(printed.out)) == ["fifo_gang_valid", "valid", "valid_cold", "bit_equal"]
    assert printed.err.endswith("fifo_gang_valid, valid\n")
