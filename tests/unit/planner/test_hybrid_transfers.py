"""Hybrids whose gradients take long to send: predicted steps, placement and its explanation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from meshrl.common.api.stats import CoreStats
from meshrl.common.hardware.accelerators import predict_gradient_transfer_s
from meshrl.common.job.config import JobConfig, PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measurements import MeasuredWork, Measurements
from meshrl.common.state.pool.demand.planned_jobs import ProcessStats, build_planned_job
from meshrl.common.state.pool.demand.requirements import PlannedJob, derive_requirements
from meshrl.services.planner.explain import format_predictions
from meshrl.services.planner.forecast.step_quantities import StepTerms, predict_gradients_s
from tests.unit.planner.plant import Plant, count_split, run
from tests.unit.planner.pools import PlannerBench, job, pool, start_pool

TERMS = StepTerms(16, 8, 2, 64, 0)
SIZE = 32_000_000_000  # 8B parameters in float32


def compute_step_s(work_s: float, ranks: int, hybrids: int, transfer_s: float) -> float:
    """Return the end of a step whose work is divided finely, by bisection."""
    low, high = 0.0, work_s / ranks
    for _ in range(60):
        middle = (low + high) / 2
        done_s = ranks * middle + hybrids * max(0.0, middle - transfer_s)
        low, high = (low, middle) if done_s >= work_s else (middle, high)
    return high


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("hybrids", [0, 1, 3])
@pytest.mark.parametrize("transfer_s", [0.0, 5.0, 40.0, 1000.0])
def test_hybrids_share_the_work_until_they_send(
    ranks: int, hybrids: int, transfer_s: float
) -> None:
    terms = replace(TERMS, core_workers=ranks, transfer_s=transfer_s)
    found = predict_gradients_s(100.0, ranks + hybrids, 1e6, terms)
    assert found == pytest.approx(compute_step_s(100.0, ranks, hybrids, transfer_s))


def plan_with_work(work_s: float, **other: Any) -> PlannedJob:
    work = MeasuredWork(steps=10, work_s=10 * work_s)
    about: dict[str, Any] = {"config": PlannerConfig(training=2), "gradient_bytes": SIZE}
    about |= {"gradient_transfer_s": 32.0, "measurements": Measurements({"core": work})}
    return job(**about | other)


@pytest.mark.parametrize(
    ("work_s", "about", "roles"),
    [
        (100.0, {}, ["core", "rollout", "training", "rollout"]),
        (20.0, {}, ["core", "rollout", "rollout", "rollout"]),
        (40.0, {"ranks": 2}, ["core", "core", "rollout", "rollout"]),
        (20.0, {"tensor_parallel": (2,)}, ["core", "rollout", "rollout"]),
    ],
)
def test_hybrid_that_cannot_send_in_time_is_not_placed(
    work_s: float, about: dict[str, Any], roles: list[str]
) -> None:
    bench = start_pool([4], plan_with_work(work_s, **about))
    assert list(bench.roles().values()) == roles


@dataclass
class SendingPlant(Plant):
    """Job whose hybrids send gradients for `transfer_s` seconds."""

    transfer_s: float = 0.0

    def stages(self, engines: int, trainers: int) -> tuple[float, float]:
        rollout_s, _ = super().stages(engines, trainers)
        gradients_s = compute_step_s(self.work_s, 1, trainers - 1, self.transfer_s)
        return rollout_s, self.fixed_s + gradients_s


@pytest.mark.parametrize(("transfer_s", "trainers"), [(0.5, 2), (15.0, 1)])
def test_engine_becomes_a_hybrid_only_if_its_transfers_pay(
    transfer_s: float, trainers: int
) -> None:
    plant = SendingPlant(work_s=16.0, transfer_s=transfer_s)
    about: dict[str, Any] = {"gradient_bytes": SIZE, "gradient_transfer_s": transfer_s}
    bench = PlannerBench(pool([3], job(steps_done=0, **about)))
    bench.settle()
    run(bench, plant, 20)
    assert count_split(bench)[1] == trainers
    [line] = [line for line in format_predictions(bench.memory) if "sends gradients" in line]
    assert line == f"job: a hybrid sends gradients of 32 GB a step in {transfer_s:.3g} s"


def test_explanation_names_the_reason_for_no_hybrid() -> None:
    plant = Plant(work_s=2.0)
    about: dict[str, Any] = {"gradient_bytes": SIZE, "gradient_transfer_s": 32.0}
    bench = PlannerBench(pool([3], job(steps_done=0, **about)))
    bench.settle()
    run(bench, plant, 8)
    [line] = [line for line in format_predictions(bench.memory) if "sends gradients" in line]
    assert line.endswith("; the core alone computes them in 2 s, so no hybrid is placed")


def test_measured_transfer_replaces_the_declared_one() -> None:
    assert predict_gradient_transfer_s(SIZE, "NVIDIA H200") == 32.0  # as fast as a bulk port
    assert predict_gradient_transfer_s(SIZE, "") == 32.0
    document = JobConfig().to_document()
    document["bundle"] = {"parameters": 8_000_000_000}
    row = {
        "id": "job",
        "phase": Phase.TRAINING,
        "groups_per_step": 16,
        "stale_requeued": 0,
        "submitted_ms": 0,
        "steps_done": 0,
        "block_reason": "",
        "checkpoint": "",
    }

    def transfer_s(measured_s: float) -> float:
        stats = CoreStats(gradient_transfer_s=measured_s).encode() | {"gang": "g0"}
        core = ProcessStats("trainer/job", "trainer", "i", stats)
        return build_planned_job(row, document, [core], {"g0": "NVIDIA H200"}).gradient_transfer_s

    assert transfer_s(0.0) == 32.0
    assert transfer_s(9.5) == 9.5


def test_bytes_of_a_hybrid_depend_on_the_type_of_its_sums() -> None:
    document = JobConfig().to_document()
    document["bundle"] = {"parameters": 100}
    assert derive_requirements(document).gradient_bytes == 400
    document["training"]["gradient_dtype"] = "bfloat16"
    assert derive_requirements(document).gradient_bytes == 200
    document["lora"]["rank"] = 8
    assert derive_requirements(document).gradient_bytes == 0
