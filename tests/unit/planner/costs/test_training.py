"""What a step of training takes by the cost model, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loadtests.layouts.cases import QWEN_14B, QWEN_30B_A3B
from meshrl.common.hardware.profiles import Accelerator, declared
from meshrl.common.hardware.shapes import ModelShape
from meshrl.services.planner.costs.training import (
    TrainingLayout,
    TrainingWork,
    bubble,
    memory_bytes,
    step_s,
)

TINY = ModelShape(2, 8, 4, 2, 2, parameters=1000.0, active=1000.0)
FREE = Accelerator("free", 1e6, 1e9, 1e30, 1e30, 1e30, 0.5, 0.5, 1.0, collective_s=0.0)
WORK = TrainingWork(sequences=8, tokens=80.0, squares=800.0)
WAY_S = (2 * 1000 * 80 + 2 * 8 * 2 * 800) / 5e5  # forward, of all, on one
ATTENTION_S = 2 * 8 * 2 * 800 / 5e5
A800 = declared()["A800"]


def test_one_accelerator_goes_there_and_back_and_through_attention_again() -> None:
    assert step_s(TINY, FREE, TrainingLayout("free"), WORK) == pytest.approx(
        3 * WAY_S + ATTENTION_S
    )


def test_layers_that_are_recomputed_go_there_twice() -> None:
    layout = TrainingLayout("free", recomputed=True)
    assert step_s(TINY, FREE, layout, WORK) == pytest.approx(4 * WAY_S)


@pytest.mark.parametrize("layout", [{"data": 4}, {"tensor": 4}, {"data": 2, "tensor": 2}])
def test_where_nothing_is_sent_four_take_a_quarter(layout: dict[str, Any]) -> None:
    alone_s = step_s(TINY, FREE, TrainingLayout("free"), WORK)
    assert step_s(TINY, FREE, TrainingLayout("free", **layout), WORK) == pytest.approx(alone_s / 4)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_fills_and_empties(stages: int) -> None:
    alone_s = step_s(TINY, FREE, TrainingLayout("free"), WORK)
    layout = TrainingLayout("free", pipeline=stages)
    expected = alone_s / stages * (8 + stages - 1) / 8
    assert step_s(TINY, FREE, layout, WORK) == pytest.approx(expected)
    assert bubble(layout, 8) == pytest.approx(1 - alone_s / stages / expected)


def test_more_replicas_than_sequences_help_nobody() -> None:
    eight = step_s(TINY, FREE, TrainingLayout("free", 8), WORK)
    assert step_s(TINY, FREE, TrainingLayout("free", 64), WORK) == pytest.approx(eight)


def test_gradients_are_exchanged_beside_what_computing_hides() -> None:
    slow = replace(FREE, link_bytes_per_s=1000.0)
    hidden_s = step_s(TINY, FREE, TrainingLayout("slow", 2), WORK)
    replicas = TrainingLayout("slow", 2, sharded=False)
    assert step_s(TINY, slow, replicas, WORK) - hidden_s == pytest.approx(0.7 * 2 * 0.5 * 2)
    sharded = TrainingLayout("slow", 2)
    assert step_s(TINY, slow, sharded, WORK) - hidden_s == pytest.approx(0.7 * 3 * 0.5 * 2)


def test_beyond_a_host_the_network_is_what_counts() -> None:
    work = TrainingWork(4096, 4096 * 2000.0, 4096 * 2000.0**2)
    inside = step_s(QWEN_14B, A800, TrainingLayout("A800", 8), work)
    outside = step_s(QWEN_14B, A800, TrainingLayout("A800", 8), replace(work, node=4))
    exchanged = 0.7 * 3 * 7 / 8 * QWEN_14B.bytes
    assert outside - inside == pytest.approx(exchanged * (1 / 25e9 - 1 / 200e9))


def test_a_mixture_sends_tokens_to_its_experts() -> None:
    work = TrainingWork(64, 64 * 1000.0, 64 * 1000.0**2)
    dense = replace(QWEN_30B_A3B, experts=0, experts_per_token=0)
    layout = TrainingLayout("A800", 8)
    more = step_s(QWEN_30B_A3B, A800, layout, work) - step_s(dense, A800, layout, work)
    sent = 8 * 8 * 1000 * 2048 * 2  # of a replica, to 8 experts each, both there and back, twice
    assert more == pytest.approx(4 * 48 * sent * 7 / 8 / 200e9)


def test_states_are_spread_and_activations_are_held_by_micro_batches() -> None:
    replicas = TrainingLayout("free", 2, tensor=2, sharded=False)
    activations = 34 * 10 * 8 * 2 / 2
    assert memory_bytes(TINY, replicas, WORK) == pytest.approx(16 * 500 + activations)
    sharded = TrainingLayout("free", 4)
    assert memory_bytes(TINY, sharded, WORK) == pytest.approx(16 * 250 + 2 * 2 * 500 + 5440)
    kept = memory_bytes(TINY, replace(sharded, recomputed=True), WORK)
    assert kept == pytest.approx(16 * 250 + 2 * 2 * 500 + (2 * 2 + 34) * 10 * 8)
