"""Profiles of kernels, and the order and times of tasks on streams."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import load_accelerators
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.hardware.zebra.costs import CHECKPOINTED_BACKWARD_FACTOR, MicroBatchCosts
from meshrl.common.hardware.zebra.declared_profiles import (
    UTILISATION,
    build_declared_profile,
    compute_speed,
)
from meshrl.common.hardware.zebra.operations import (
    Operation,
    RankStream,
    plan_operations,
    simulate_plan_s,
)
from meshrl.common.hardware.zebra.profile import (
    AcceleratorCosts,
    CostCurve,
    MixtureProfile,
    parse_accelerator_costs,
)
from meshrl.common.hardware.zebra.schedule import (
    ScheduledTask,
    TaskKind,
    order_attention_tasks,
    order_expert_tasks,
)
from meshrl.common.hardware.zebra.timeline import (
    build_timeline,
    compute_makespan_s,
    compute_serial_s,
)

LINE = CostCurve((1,), (1e-6,))
FAST = AcceleratorCosts("A40", 4e10, LINE, CostCurve((1024, 4096), (0.001, 0.007)), LINE)
SLOW = AcceleratorCosts("V100", 1e10, LINE)
PROFILE = MixtureProfile(
    fast=FAST,
    slow=SLOW,
    layers=4,
    experts=8,
    experts_per_token=2,
    row_bytes=4096,
    link_bytes_per_s=1e10,
    attention_bytes=1e9,
    expert_bytes=1e8,
    attention_gradient_bytes=1e8,
    expert_gradient_bytes=1e7,
    attention_token_bytes=1e4,
    expert_row_bytes=4096,
)
# The source's W1 without its gate: hidden size 2,048, 8 key-value heads of 128, 12 experts.
EXPERT = 3 * 2048 * 7168
PARAMETERS = 4 * (2 * 2048 * 3072 + 12 * 2048 + 12 * EXPERT) + 2 * 32000 * 2048
SHAPE = ModelShape(4, 2048, 16, 8, 128, PARAMETERS, PARAMETERS - 40 * EXPERT, 12, 2)
seconds = st.floats(0, 2)
E, H = TaskKind.EXPERTS, TaskKind.HOSTED


def test_curve_interpolates_linearly_between_measurements() -> None:
    curve = CostCurve((1000, 2000, 4000), (1.0, 3.0, 11.0))
    assert [curve.interpolate_s(x) for x in (0, 500, 1000, 1500, 3000, 5000)] == [
        0,
        0.5,
        1,
        2,
        7,
        15,
    ]
    assert LINE.interpolate_s(12345) == pytest.approx(0.012345)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_curve_is_monotonic(a: int, b: int) -> None:
    curve = CostCurve((1000, 2000, 4000), (1.0, 3.0, 11.0))
    assert curve.interpolate_s(min(a, b)) <= curve.interpolate_s(max(a, b))


@pytest.mark.parametrize(
    ("at", "values"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((0, 1), (0.0, 1.0)),
        ((1, 2), (2.0, 1.0)),
        ((1,), (float("nan"),)),
        ((1,), (-1.0,)),
    ],
)
def test_invalid_curve_is_rejected(at: tuple[int, ...], values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        CostCurve(at, values)


def test_accelerator_costs_round_trip_json() -> None:
    assert parse_accelerator_costs(json.loads(json.dumps(asdict(FAST))), "fast") == FAST


def test_profile_without_attention_or_memory_is_rejected() -> None:
    for fast, error in ((SLOW, "has no attention"), (replace(FAST, memory_bytes=0.0), "0.0 bytes")):
        with pytest.raises(ConfigError, match=error) as raised:
            replace(PROFILE, fast=fast)
        assert raised.value.where and raised.value.fix


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (3, "AcceleratorCosts is not a table"),
        ({"name": "V100"}, "memory_bytes is missing"),
        (asdict(SLOW) | {"speed": 3}, "speed is not known"),
        (asdict(SLOW) | {"memory_bytes": "many"}, "memory_bytes of slow is 'many'"),
        (asdict(SLOW) | {"memory_bytes": True}, "memory_bytes of slow is True"),
        ({"name": 1, "memory_bytes": 1.0, "experts": {}}, "slow is called 1"),
        (asdict(SLOW) | {"experts": {"at": 1, "seconds": [1]}}, "list"),
    ],
)
def test_invalid_accelerator_costs_are_rejected(table: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as raised:
        parse_accelerator_costs(table, "slow")
    assert raised.value.where and raised.value.fix


def attention_ratio(profile: MixtureProfile, length: int) -> float:
    """Return the ratio of the slow kind's attention time to the fast kind's."""
    fast, slow = profile.fast.attention, profile.slow.attention
    assert isinstance(fast, CostCurve) and isinstance(slow, CostCurve)
    return slow.interpolate_s(length) / fast.interpolate_s(length)


def experts_ratio(profile: MixtureProfile) -> float:
    return profile.slow.experts.interpolate_s(1000) / profile.fast.experts.interpolate_s(1000)


def test_v100_is_four_fifths_of_an_a40_for_experts_and_less_for_attention() -> None:
    profile = build_declared_profile(SHAPE, "A40", "V100")
    assert experts_ratio(profile) == pytest.approx(1 / 0.8)
    assert attention_ratio(profile, 65536) == pytest.approx(3.7, rel=0.01)
    assert 1.25 < attention_ratio(profile, 1024) < attention_ratio(profile, 8192) < 3.7


def test_t4_has_the_measured_ratios_to_an_l40s() -> None:
    profile = build_declared_profile(SHAPE, "L40S", "T4")
    assert experts_ratio(profile) == pytest.approx(7.0)
    assert attention_ratio(profile, 4096) == pytest.approx(9.9, rel=0.01)
    assert attention_ratio(profile, 65536) == pytest.approx(13.6, rel=0.01)
    middle = build_declared_profile(SHAPE, "L40S", "T4", score_speed=0.5)
    assert attention_ratio(middle, 65536) == pytest.approx(13.6, rel=0.01)


def test_speeds_of_other_kinds_follow_their_peaks() -> None:
    assert (
        compute_speed("A100").matrix_flops_per_s == load_accelerators()["A100"].flops * UTILISATION
    )
    assert compute_speed("T4").interpolate_score_flops_per_s(100) == compute_speed(
        "T4"
    ).interpolate_score_flops_per_s(4096)
    low, middle, high = (
        1 / compute_speed("T4").interpolate_score_flops_per_s(k << 10) for k in (4, 16, 64)
    )
    assert middle == pytest.approx((low + high) / 2)
    with pytest.raises(ConfigError, match="there is no profile of abacus"):
        compute_speed("abacus")


def test_times_and_bytes_follow_the_model_shape() -> None:
    profile = build_declared_profile(SHAPE, "A40", "V100")
    rate = load_accelerators()["A40"].flops * UTILISATION
    assert profile.fast.experts.interpolate_s(1) == pytest.approx(2 * EXPERT / rate)
    assert profile.fast.head is not None and profile.fast.attention is not None
    assert profile.fast.head.interpolate_s(1) == pytest.approx(2 * 32000 * 2048 / rate)
    flops = 4096 * 2 * (2 * 2048 * 3072 + 12 * 2048) + 2 * 4096**2 * 2048
    assert profile.fast.attention.interpolate_s(4096) == pytest.approx(flops / rate)
    assert profile.expert_bytes == pytest.approx(16 * EXPERT)
    assert profile.attention_bytes + 48 * profile.expert_bytes == pytest.approx(16 * PARAMETERS)
    assert profile.row_bytes == 4096 and profile.link_bytes_per_s == 6.25e9


def test_dense_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="0 of 0 experts"):
        build_declared_profile(ModelShape(4, 2048, 16, 8, 128, 1e9, 1e9), "A40", "V100")


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, MicroBatchCosts]:
    """Draw layers, micro-batches, and costs with some experts hosted."""
    layers, micros = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    hosted = draw(st.lists(st.sampled_from((0.0, 0.3)), min_size=layers, max_size=layers))
    costs = MicroBatchCosts(
        attention_s=draw(seconds),
        experts_s=draw(seconds),
        head_s=draw(seconds),
        dispatch_s=draw(seconds),
        combine_s=draw(seconds),
        hosted_s=tuple(hosted),
        expert_rank_shares=tuple(0.5 if one else 1.0 for one in hosted),
        backward_factor=draw(st.floats(1, 3)),
    )
    return layers, micros, costs


def plan_step(layers: int, micros: int, costs: MicroBatchCosts) -> list[Operation]:
    """Plan the operations in the schedule's own order."""
    attention = order_attention_tasks(layers, micros, costs.has_hosted_experts)
    return plan_operations(layers, attention, order_expert_tasks(layers, micros))


def list_dependencies(
    stream: RankStream, task: ScheduledTask, layers: int, hosts: tuple[bool, ...]
) -> list[tuple[RankStream, ScheduledTask]]:
    """List the dependencies of a task as the paper defines them."""
    backward, layer, micro, work = task
    if stream is RankStream.DISPATCH:
        return [
            (RankStream.ATTENTION, ScheduledTask(backward, layer + 1 if backward else layer, micro))
        ]
    if stream is RankStream.COMBINE:
        dependencies = [(RankStream.EXPERTS, task)]
        return dependencies + (
            [(RankStream.ATTENTION, ScheduledTask(backward, layer, micro, H))]
            if hosts[layer]
            else []
        )
    if work is not TaskKind.ATTENTION:
        return [(RankStream.DISPATCH, ScheduledTask(backward, layer, micro, E))]
    if backward:
        last_attention = (RankStream.ATTENTION, ScheduledTask(False, layer, micro))
        return [
            last_attention
            if layer == layers
            else (RankStream.COMBINE, ScheduledTask(True, layer, micro, E))
        ]
    return [(RankStream.COMBINE, ScheduledTask(False, layer - 1, micro, E))] if layer else []


@given(steps())
def test_tasks_start_as_soon_as_their_dependencies_end(
    step: tuple[int, int, MicroBatchCosts],
) -> None:
    layers, micros, costs = step
    plan = plan_step(layers, micros, costs)
    for stream, task, _, *numbers in plan:
        dependencies = {(plan[n - 1].stream, plan[n - 1].task) for n in numbers if n}
        assert dependencies == set(
            list_dependencies(stream, task, layers, costs.has_hosted_experts)
        )
    assert compute_makespan_s(layers, micros, costs) == pytest.approx(
        simulate_plan_s(layers, plan, costs)
    )
    assert build_timeline(layers, micros, costs).makespan_s == compute_makespan_s(
        layers, micros, costs
    )


@given(steps())
def test_streams_follow_the_schedules_order(step: tuple[int, int, MicroBatchCosts]) -> None:
    layers, micros, costs = step
    tasks_by_stream: dict[RankStream, list[ScheduledTask]] = {stream: [] for stream in RankStream}
    for operation in plan_step(layers, micros, costs):
        tasks_by_stream[operation.stream].append(operation.task)
    assert tasks_by_stream[RankStream.ATTENTION] == order_attention_tasks(
        layers, micros, costs.has_hosted_experts
    )
    assert (
        tasks_by_stream[RankStream.EXPERTS]
        == tasks_by_stream[RankStream.COMBINE]
        == order_expert_tasks(layers, micros)
    )
    assert tasks_by_stream[RankStream.DISPATCH] == order_expert_tasks(layers, micros)


@given(steps())
def test_makespan_is_between_the_busiest_kind_and_the_serial_time(
    step: tuple[int, int, MicroBatchCosts],
) -> None:
    layers, micros, costs = step
    timeline = build_timeline(layers, micros, costs)
    assert timeline.makespan_s >= max(timeline.attention_busy_s, timeline.experts_busy_s) - 1e-9
    serial_s = timeline.attention_busy_s + timeline.experts_busy_s + timeline.transfer_s
    assert timeline.makespan_s <= serial_s + 1e-9
    assert 0 <= timeline.hidden_transfer_share <= 1
    assert 0 <= timeline.attention_utilisation <= 1 + 1e-9


@given(steps())
def test_one_micro_batch_hides_no_transfer(step: tuple[int, int, MicroBatchCosts]) -> None:
    layers, _, costs = step
    assert compute_serial_s(layers, 1, costs) == pytest.approx(compute_makespan_s(layers, 1, costs))
    assert compute_serial_s(layers, 3, costs) >= compute_makespan_s(layers, 3, costs) - 1e-9
    if costs.dispatch_s + costs.combine_s > 1e-3:
        assert build_timeline(layers, 1, costs).hidden_transfer_share == pytest.approx(
            0.0, abs=1e-6
        )


def test_more_micro_batches_keep_experts_busy() -> None:
    busy = [
        build_timeline(8, micros, MicroBatchCosts(0.6, 1.0)).experts_utilisation
        for micros in (1, 2, 3, 6)
    ]
    assert busy == sorted(busy)
    assert busy[0] < 0.63 and busy[-1] > 0.98
    assert (
        build_timeline(
            8, 6, MicroBatchCosts(0.6, 1.0, dispatch_s=0.2, combine_s=0.2)
        ).hidden_transfer_share
        > 0.9
    )


def test_backward_cost_is_scaled_unless_measured() -> None:
    costs = MicroBatchCosts(
        1.0,
        2.0,
        head_s=3.0,
        hosted_s=(1.0,),
        expert_rank_shares=(0.5,),
        backward_factor=CHECKPOINTED_BACKWARD_FACTOR,
    )
    assert costs.get_task_s(ScheduledTask(True, 0, 0)) == 3.0 and costs.get_head_s(True) == 9.0
    assert (
        costs.get_task_s(ScheduledTask(True, 0, 0, E)) == 3.0
        and costs.get_task_s(ScheduledTask(True, 0, 0, H)) == 3.0
    )
    assert replace(costs, head_backward_s=7.0).get_head_s(True) == 7.0


def test_deadlocked_order_is_rejected() -> None:
    experts = order_expert_tasks(1, 2)
    with pytest.raises(ConfigError, match="never starts"):
        plan_operations(1, order_attention_tasks(1, 2), experts[::-1])
    assert (
        simulate_plan_s(
            1, plan_operations(1, order_attention_tasks(1, 2), experts), MicroBatchCosts(1, 1)
        )
        > 0
    )


@pytest.mark.parametrize(
    "costs", [{"attention_s": -1.0}, {"dispatch_s": float("nan")}, {"hosted_s": (float("inf"),)}]
)
def test_invalid_costs_are_rejected(costs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MicroBatchCosts(**{"attention_s": 1.0, "experts_s": 1.0} | costs)


def test_hosting_costs_must_cover_all_layers() -> None:
    with pytest.raises(ConfigError, match="1 of 2 layers"):
        compute_makespan_s(
            2, 1, MicroBatchCosts(1, 1, hosted_s=(0.5,), expert_rank_shares=(0.5, 1.0))
        )


def format_order(order: list[ScheduledTask]) -> str:
    """Format an order: F01 is the forward of layer 0 and micro-batch 1; h marks hosted experts."""
    return " ".join(
        ("h" if task.kind is TaskKind.HOSTED else "")
        + "FB"[task.backward]
        + f"{task.layer}{task.micro_batch}"
        for task in order
    )


def test_last_stage_alternates_and_backward_layers_are_reversed() -> None:
    assert (
        format_order(order_attention_tasks(2, 2))
        == "F00 F01 F10 F11 F20 B20 F21 B21 B10 B11 B00 B01"
    )
    assert format_order(order_expert_tasks(2, 2)) == "F00 F01 F10 F11 B10 B11 B00 B01"


def test_hosted_experts_run_after_forward_and_before_backward_attention() -> None:
    order = order_attention_tasks(2, 2, (False, True))
    hosted = "F00 F01 F10 F11 hF10 hF11 F20 B20 F21 B21 hB10 hB11 B10 B11 B00 B01"
    assert format_order(order) == hosted


@given(
    layers=st.integers(1, 5), micros=st.integers(1, 5), hosted=st.lists(st.booleans(), max_size=5)
)
def test_each_task_is_scheduled_once(layers: int, micros: int, hosted: list[bool]) -> None:
    attention = order_attention_tasks(layers, micros, hosted)
    assert len(set(attention)) == len(attention)
    hosts = sum(hosted[:layers])
    assert len(attention) == 2 * micros * (layers + 1 + hosts)
    experts = order_expert_tasks(layers, micros)
    assert len(set(experts)) == len(experts) == 2 * micros * layers
