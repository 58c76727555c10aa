"""The order of tasks is that of Theorem 1 of HeterMoE, with experts in the last layer as well."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.hardware.zebra.schedule import Task, TaskKind, attention_order, expert_order


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
