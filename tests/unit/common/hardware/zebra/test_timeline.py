"""Order and times of tasks on streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.costs import CHECKPOINTED, Costs
from meshrl.common.hardware.zebra.operations import Operation, RankStream, plan_s, planned_as
from meshrl.common.hardware.zebra.schedule import Task, TaskKind, attention_order, expert_order
from meshrl.common.hardware.zebra.timeline import makespan, serial_s, timeline

seconds = st.floats(0, 2)
E, H = TaskKind.EXPERTS, TaskKind.HOSTED


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, Costs]:
    """Layers, micro-batches, and costs with some experts hosted."""
    layers, micros = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    hosted = draw(st.lists(st.sampled_from((0.0, 0.3)), min_size=layers, max_size=layers))
    costs = Costs(
        attention=draw(seconds),
        experts=draw(seconds),
        head=draw(seconds),
        dispatch=draw(seconds),
        combine=draw(seconds),
        hosted=tuple(hosted),
        kept=tuple(0.5 if one else 1.0 for one in hosted),
        backward=draw(st.floats(1, 3)),
    )
    return layers, micros, costs


def planned(layers: int, micros: int, costs: Costs) -> list[Operation]:
    """The plan of the schedule's own order."""
    attention = attention_order(layers, micros, costs.hosts)
    return planned_as(layers, attention, expert_order(layers, micros))


def needed(
    stream: RankStream, task: Task, layers: int, hosts: tuple[bool, ...]
) -> list[tuple[RankStream, Task]]:
    """What a task needs, as the source words it."""
    back, layer, micro, work = task
    if stream is RankStream.DISPATCH:
        return [(RankStream.ATTENTION, Task(back, layer + 1 if back else layer, micro))]
    if stream is RankStream.COMBINE:
        both = [(RankStream.EXPERTS, task)]
        return both + (
            [(RankStream.ATTENTION, Task(back, layer, micro, H))] if hosts[layer] else []
        )
    if work is not TaskKind.ATTENTION:
        return [(RankStream.DISPATCH, Task(back, layer, micro, E))]
    if back:
        last = (RankStream.ATTENTION, Task(False, layer, micro))
        return [last if layer == layers else (RankStream.COMBINE, Task(True, layer, micro, E))]
    return [(RankStream.COMBINE, Task(False, layer - 1, micro, E))] if layer else []


@given(steps())
def test_a_task_starts_as_soon_as_it_may(step: tuple[int, int, Costs]) -> None:
    layers, micros, costs = step
    plan = planned(layers, micros, costs)
    for stream, task, _, *numbers in plan:
        found = {(plan[n - 1].stream, plan[n - 1].task) for n in numbers if n}
        assert found == set(needed(stream, task, layers, costs.hosts))
    assert makespan(layers, micros, costs) == pytest.approx(plan_s(layers, plan, costs))
    assert timeline(layers, micros, costs).makespan == makespan(layers, micros, costs)


@given(steps())
def test_streams_run_in_the_order_of_the_schedule(step: tuple[int, int, Costs]) -> None:
    layers, micros, costs = step
    run: dict[RankStream, list[Task]] = {stream: [] for stream in RankStream}
    for operation in planned(layers, micros, costs):
        run[operation.stream].append(operation.task)
    assert run[RankStream.ATTENTION] == attention_order(layers, micros, costs.hosts)
    assert run[RankStream.EXPERTS] == run[RankStream.COMBINE] == expert_order(layers, micros)
    assert run[RankStream.DISPATCH] == expert_order(layers, micros)


@given(steps())
def test_a_step_is_no_shorter_than_either_kinds_work_and_no_longer_than_all_of_it(
    step: tuple[int, int, Costs],
) -> None:
    layers, micros, costs = step
    found = timeline(layers, micros, costs)
    assert found.makespan >= max(found.attention_busy, found.experts_busy) - 1e-9
    everything = found.attention_busy + found.experts_busy + found.transfers
    assert found.makespan <= everything + 1e-9
    assert 0 <= found.hidden <= 1
    assert 0 <= found.attention_utilisation <= 1 + 1e-9


@given(steps())
def test_one_micro_batch_hides_nothing(step: tuple[int, int, Costs]) -> None:
    layers, _, costs = step
    assert serial_s(layers, 1, costs) == pytest.approx(makespan(layers, 1, costs))
    assert serial_s(layers, 3, costs) >= makespan(layers, 3, costs) - 1e-9
    if costs.dispatch + costs.combine > 1e-3:
        assert timeline(layers, 1, costs).hidden == pytest.approx(0.0, abs=1e-6)


def test_more_micro_batches_keep_experts_busy() -> None:
    busy = [timeline(8, micros, Costs(0.6, 1.0)).experts_utilisation for micros in (1, 2, 3, 6)]
    assert busy == sorted(busy)
    assert busy[0] < 0.63 and busy[-1] > 0.98
    assert timeline(8, 6, Costs(0.6, 1.0, dispatch=0.2, combine=0.2)).hidden > 0.9


def test_backward_costs_more_unless_it_was_measured() -> None:
    costs = Costs(1.0, 2.0, head=3.0, hosted=(1.0,), kept=(0.5,), backward=CHECKPOINTED)
    assert costs.of(Task(True, 0, 0)) == 3.0 and costs.head_of(True) == 9.0
    assert costs.of(Task(True, 0, 0, E)) == 3.0 and costs.of(Task(True, 0, 0, H)) == 3.0
    assert replace(costs, head_backward=7.0).head_of(True) == 7.0


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    experts = expert_order(1, 2)
    with pytest.raises(ConfigError, match="never starts"):
        planned_as(1, attention_order(1, 2), experts[::-1])
    assert plan_s(1, planned_as(1, attention_order(1, 2), experts), Costs(1, 1)) > 0


@pytest.mark.parametrize(
    "costs", [{"attention": -1.0}, {"dispatch": float("nan")}, {"hosted": (float("inf"),)}]
)
def test_what_is_no_time_is_refused(costs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Costs(**{"attention": 1.0, "experts": 1.0} | costs)


def test_layers_have_to_be_told_of_all_or_none() -> None:
    with pytest.raises(ConfigError, match="1 of 2 layers"):
        makespan(2, 1, Costs(1, 1, hosted=(0.5,), kept=(0.5, 1.0)))


def written(order: list[Task]) -> str:
    """F01 is a forward of layer 0 and micro-batch 1; h is of hosted experts."""
    return " ".join(
        ("h" if task.work is TaskKind.HOSTED else "")
        + "FB"[task.backward]
        + f"{task.layer}{task.micro}"
        for task in order
    )


def test_the_last_piece_alternates_and_layers_go_back_in_reverse() -> None:
    assert written(attention_order(2, 2)) == "F00 F01 F10 F11 F20 B20 F21 B21 B10 B11 B00 B01"
    assert written(expert_order(2, 2)) == "F00 F01 F10 F11 B10 B11 B00 B01"


def test_hosted_experts_follow_their_piece_and_go_back_before_it() -> None:
    order = attention_order(2, 2, (False, True))
    hosted = "F00 F01 F10 F11 hF10 hF11 F20 B20 F21 B21 hB10 hB11 B10 B11 B00 B01"
    assert written(order) == hosted


@given(
    layers=st.integers(1, 5), micros=st.integers(1, 5), hosted=st.lists(st.booleans(), max_size=5)
)
def test_each_task_runs_once(layers: int, micros: int, hosted: list[bool]) -> None:
    attention = attention_order(layers, micros, hosted)
    assert len(set(attention)) == len(attention)
    hosts = sum(hosted[:layers])
    assert len(attention) == 2 * micros * (layers + 1 + hosts)
    experts = expert_order(layers, micros)
    assert len(set(experts)) == len(experts) == 2 * micros * layers
