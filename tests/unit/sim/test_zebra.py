"""The model of HeterMoE has its models and setups, and is near what the source has measured."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.hardware.zebra.costs import Costs
from meshrl.common.hardware.zebra.schedule import attention_order
from meshrl.common.hardware.zebra.timeline import makespan
from meshrl.sim.zebra.figures import NEAR, K, PaperFigure, causes, runs
from meshrl.sim.zebra.orders import all_orders, best_of_all, best_of_swaps
from meshrl.sim.zebra.runs import plain, with_and_without
from meshrl.sim.zebra.setups import MODELS, ON_PREM, SETUPS, PaperModel, grid, profile


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_make_experts_as_wide_as_mixtrals(model: PaperModel) -> None:
    assert model.ffn == 3.5 * model.hidden
    shape = model.shape
    embeddings = 2 * 32_000 * model.hidden
    assert shape.parameters - embeddings == pytest.approx(model.parameters, rel=0.03)
    assert shape.active < shape.parameters


def test_models_run_where_their_experts_divide() -> None:
    assert grid(["O2"]) == [("W2", "O2"), ("D1", "O2"), ("D3", "O2")]
    assert profile("D1", SETUPS["O1"]).slow.memory_bytes < 16e9


def test_zebra_is_as_much_faster_than_expert_parallelism_as_the_source_says() -> None:
    for k, source in ((4, 1 / 0.82), (32, 1.89)):
        gains = [one.zebra / one.together for one in runs(ON_PREM, [k * K]).values()]
        assert mean(gains) == pytest.approx(source, rel=NEAR)


def test_baselines_are_slower_and_ideal_ones_nearly_as_fast() -> None:
    found = runs(["O1"], [16 * K])
    assert len(found) == 4
    for one in found.values():
        assert one.disaggregated < one.together < one.ideal < one.zebra
        assert one.pipeline is not None and one.pipeline < one.zebra


def test_hosted_experts_fill_the_bubbles_of_attention_ranks() -> None:
    none, some = with_and_without("D1", 8 * K, plainly=True)
    assert none.attention_utilisation == pytest.approx(0.55, rel=NEAR)
    assert none.experts_utilisation == pytest.approx(0.89, rel=NEAR)
    assert some.attention_utilisation > 0.8 and some.makespan < none.makespan
    ours = with_and_without("D1", 8 * K)[1]
    assert ours.makespan <= some.makespan + 1e-12


def test_a_figure_that_is_far_off_has_a_cause() -> None:
    near, far = PaperFigure("near", "", 1.0, 1.1), PaperFigure("dist", "", 0.55, 0.44)
    assert far.off == pytest.approx(-0.2)
    assert list(causes([near, far]).values()) == [["dist"]]
    unheard = PaperFigure("unheard", "", 1.0, 2.0)
    assert causes([unheard]) == {"not known": ["unheard"]}


def test_all_orders_are_tried() -> None:
    orders = set(all_orders(attention_order(1, 2), 2))
    assert len(orders) == 70  # of two times four tasks
    assert tuple(attention_order(1, 2)) in orders


costs = st.builds(
    Costs,
    attention=st.floats(0.1, 1),
    experts=st.floats(0.1, 1),
    head=st.floats(0.5, 2),
    dispatch=st.floats(0, 0.5),
    combine=st.floats(0, 0.5),
    backward=st.sampled_from((2.0, 3.0)),
)


@settings(max_examples=5)
@given(st.lists(costs, min_size=5, max_size=5))
def test_no_other_order_is_faster(many: list[Costs]) -> None:
    for one, best in zip(many, best_of_all(1, 2, many), strict=True):
        assert makespan(1, 2, one) == pytest.approx(best)


@settings(max_examples=10)
@given(costs, st.integers(0, 99))
def test_no_swap_makes_a_longer_step_faster(one: Costs, seed: int) -> None:
    assert best_of_swaps(4, 3, one, 60, seed) == pytest.approx(makespan(4, 3, one))


def test_of_the_sources_costs_no_swap_is_faster_either() -> None:
    one, _ = plain("D1", 8 * K)
    assert best_of_swaps(8, 4, one, 60, 1) == pytest.approx(makespan(8, 4, one))


def test_another_order_wins_where_the_last_piece_and_transfers_cost_nothing() -> None:
    bare = Costs(attention=1.0, experts=0.5)
    best = best_of_all(1, 2, [bare])[0]
    assert 0.9 < best / makespan(1, 2, bare) < 1
