"""The ways to train that are looked at."""

from __future__ import annotations

from dataclasses import replace

from loadtests.layouts.cases import QWEN_14B
from meshrl.common.hardware.profiles import declared
from meshrl.services.planner.costs.training import TrainingLayout, TrainingWork, step_s
from meshrl.services.planner.layouts.nodes import LayoutNode
from meshrl.sim.cluster.ways import Trainable, TrainingWays

WORK = TrainingWork(64, 64 * 2000.0, 64 * 2000.0**2)
NODES = [LayoutNode("A800", f"host{n}", 8) for n in range(4)] + [LayoutNode("H100", "host4", 8)]
DIMENSIONS = (1, 2, 4, 8)
SIMULATED = Trainable(DIMENSIONS, DIMENSIONS, sharded=False)
TRAINS = TrainingWays(QWEN_14B, WORK, declared())


def test_ranks_and_helpers_are_replicas_of_any_number_that_has_the_memory() -> None:
    found = TRAINS.ways(NODES)
    assert {(way.layout.tensor, way.layout.pipeline) for way in found} == {(1, 1)}
    of = {kind: {w.layout.data for w in found if w.layout.kind == kind} for kind in declared()}
    # 16 bytes of 14.8e9 parameters are not below 79 GB of each of three.
    assert of["A800"] == set(range(4, 33))
    assert of["H100"] == set(range(4, 9))
    assert not of["L40S"]


def test_a_core_has_its_ranks_and_a_job_its_most() -> None:
    found = replace(TRAINS, by=Trainable(least=6, most=10)).ways(NODES)
    assert {way.layout.data for way in found} == set(range(6, 11))


def test_a_simulated_cluster_trains_in_three_dimensions() -> None:
    found = replace(TRAINS, by=SIMULATED).ways(NODES)
    layouts = {way.layout for way in found}
    assert TrainingLayout("A800", 2, 8, 2, False) in layouts
    assert TrainingLayout("H100", 1, 4, 2, False) in layouts
    for layout in layouts:
        assert layout.workers <= (32 if layout.kind == "A800" else 8)
        assert layout.tensor in (1, 2, 4, 8)
        assert layout.pipeline in (1, 2, 4, 8)
    assert {layout.pipeline for layout in layouts} == {1, 2, 4, 8}


def test_tensors_stay_in_a_node() -> None:
    found = replace(TRAINS, by=SIMULATED).ways(
        [LayoutNode("A800", f"host{n}", 5) for n in range(8)]
    )
    assert max(way.layout.tensor for way in found) == 4


def test_pipelines_that_wait_half_of_the_time_are_left_out() -> None:
    found = replace(TRAINS, by=SIMULATED, work=replace(WORK, sequences=4)).ways(NODES)
    assert found
    assert all(way.layout.pipeline - 1 <= max(1, 4 // way.layout.data) for way in found)


def test_accelerators_are_added_by_the_grain() -> None:
    found = replace(TRAINS, by=Trainable(grain=8)).ways(NODES)
    assert {way.layout.data for way in found} == {8, 16, 24, 32}


def test_times_are_those_of_the_cost_model() -> None:
    for way in TRAINS.ways(NODES):
        assert way.seconds == step_s(QWEN_14B, declared()[way.layout.kind], way.layout, WORK)
