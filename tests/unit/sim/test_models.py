"""Simulated engines, prefix loading and HeterMoE: agreement with declared and measured times."""

from __future__ import annotations

import json
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.api.engine import FinishReason
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS
from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.schedule import order_attention_tasks
from meshrl.common.hardware.zebra.timeline import compute_makespan_s
from meshrl.common.job.memory.cache_blocks import MAX_PREFILL_TOKENS
from meshrl.sim.prefixes.__main__ import A100, GBPS_32, H100, PUBLISHED_SPEEDUPS, TOKEN_BYTES, main
from meshrl.sim.prefixes.prefix_model import PrefixCurve, simulate_events, solve_closed_form
from meshrl.sim.zebra.paper_figures import (
    KIB,
    TOLERANCE,
    PaperFigure,
    find_best_of_all,
    find_best_of_swaps,
    generate_orders,
    group_by_cause,
    run_grid,
)
from meshrl.sim.zebra.paper_runs import compare_hosting, compute_plain_costs
from meshrl.sim.zebra.paper_setups import (
    MODELS,
    ON_PREM,
    SETUPS,
    PaperModel,
    build_profile,
    list_grid,
)
from tests.unit.common.generation.engines_under_test import VOCAB, ManualClock, request, simulated


def get_clock(engine: object) -> ManualClock:
    clock = engine._clock  # type: ignore[attr-defined]
    assert isinstance(clock, ManualClock)
    return clock


def test_requests_run_at_the_declared_rate_under_any_load() -> None:
    engine, listener = simulated(slots=8, rate=40.0)
    engine.submit([request(i, max_new=1000) for i in range(5)])
    get_clock(engine).advance(10.0)
    engine.step()
    listener.drain()
    assert [len(h.tokens) for h in listener.outputs.values()] == [400] * 5


def test_step_is_never_early() -> None:
    engine, _ = simulated(rate=40.0)
    engine.submit([request(1)])
    assert engine.next_step_delay_s == pytest.approx(0.025)
    get_clock(engine).advance(0.02)
    assert engine.step() and engine.tokens_generated == 0
    get_clock(engine).advance(engine.next_step_delay_s)
    assert engine.step() and engine.tokens_generated == 1


def test_slot_freed_between_steps_is_used_from_then_on() -> None:
    engine, listener = simulated(slots=1, rate=10.0)
    engine.submit([request(i, max_new=10) for i in range(3)])
    get_clock(engine).advance(2.5)
    engine.step()
    listener.drain()
    assert [len(listener.outputs[i].tokens) for i in range(3)] == [10, 10, 5]
    assert engine.num_running == 1 and engine.num_waiting == 0


def test_lengths_are_lognormal_and_end_with_a_stop_token() -> None:
    _, listener = simulated(slots=2000, rate=100.0, lengths=(50.0, 0.7))
    requests = [request(i, max_new=5000, stop_ids=(3,)) for i in range(2000)]
    get_clock(listener.engine).advance(0)
    listener.engine.submit(requests)
    get_clock(listener.engine).advance(1000.0)
    heard = listener.run()
    lengths = np.array([len(h.tokens) for h in heard.values()])
    assert np.median(lengths) == pytest.approx(50, rel=0.08)
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.08)
    assert all(
        h.finish == [FinishReason.STOP] and h.tokens.index(3) == len(h.tokens) - 1
        for h in heard.values()
    )


def test_length_above_the_limit_is_cut() -> None:
    _, listener = simulated(lengths=(100.0, 0.8))
    heard = listener.run(*(request(i, max_new=5, stop_ids=(3,)) for i in range(20)))
    assert all(len(h.tokens) <= 5 for h in heard.values())
    assert sum(h.finish == [FinishReason.LENGTH] for h in heard.values()) > 15


def test_pause_adds_no_tokens() -> None:
    engine, listener = simulated(rate=10.0)
    engine.submit([request(1, max_new=100)])
    get_clock(engine).advance(1.0)
    engine.pause()
    get_clock(engine).advance(50.0)
    engine.resume()
    get_clock(engine).advance(1.0)
    engine.step()
    listener.drain()
    assert len(listener.outputs[1].tokens) == 20


def test_resubmitted_request_continues_with_the_same_tokens() -> None:
    whole = simulated()[1].run(request(1, [4, 5], max_new=30, seed=6))[1].tokens
    rest = simulated()[1].run(request(2, [4, 5, *whole[:11]], max_new=19, seed=6))[2].tokens
    assert rest == whole[11:]


def test_runs_with_one_seed_are_equal() -> None:
    def run(seed: int) -> list[list[int]]:
        heard = simulated(seed=seed, lengths=(8.0, 0.8))[1].run(
            *(request(i, stop_ids=(1,)) for i in range(9))
        )
        return [h.tokens for h in heard.values()]

    assert run(4) == run(4)
    assert run(4) != run(5)


def test_flushed_tokens_carry_their_weight_version() -> None:
    engine, listener = simulated(slots=2, rate=10.0)
    engine.submit([request(1, max_new=6), request(2, max_new=30), request(3, max_new=30)])
    for version in (1, 2):
        get_clock(engine).advance(0.4)
        engine.update_weights({}, version)
    get_clock(engine).advance(0.4)
    engine.step()
    listener.drain()
    assert listener.outputs[1].versions == [0] * 4 + [1] * 2
    assert listener.outputs[2].versions == [0] * 4 + [1] * 4 + [2] * 4
    assert listener.outputs[3].versions == [1] * 2 + [2] * 4, "it took the first one's slot"


def test_only_the_last_token_is_a_stop_token() -> None:
    stops = (0, 5, VOCAB - 1)
    _, listener = simulated(lengths=(60.0, 0.8))
    heard = listener.run(*(request(i, max_new=500, stop_ids=stops) for i in range(30)))
    seen = {token for h in heard.values() for token in h.tokens[:-1]}
    assert seen == set(range(VOCAB)) - set(stops)


def test_simulated_session_has_no_cache_to_copy() -> None:
    engine, listener = simulated()
    listener.run(request(1, session=3))
    assert engine.describe_session_cache(3) is None and engine.copy_session_cache(3, 0, 1) is None


def test_closed_form_balances_compute_and_load_time() -> None:
    curve = PrefixCurve(0.1, 0.0)
    met = solve_closed_form(curve, 0.1 / MAX_PREFILL_TOKENS, 8192)
    assert met.computed_tokens == pytest.approx(4096) and met.seconds == pytest.approx(0.8)
    slow = solve_closed_form(curve, 0.3 / MAX_PREFILL_TOKENS, 8192)
    compute_s, load_s = 1.6, 4.8
    assert slow.seconds == pytest.approx(compute_s * load_s / (compute_s + load_s))


@given(
    first_s=st.floats(0.005, 0.5),
    growth=st.floats(0, 0.1),
    ratio=st.floats(0.05, 20),
    chunks=st.integers(16, 256),
)
def test_loading_rules_are_near_the_optimum(
    first_s: float, growth: float, ratio: float, chunks: int
) -> None:
    tokens = chunks * CHUNK_TOKENS
    curve = PrefixCurve(first_s, first_s * growth)
    compute_s = curve.predict_compute_s(0, tokens)
    load_s = ratio * compute_s / tokens
    met, best = simulate_events(curve, load_s, tokens), solve_closed_form(curve, load_s, tokens)
    step_s = curve.predict_compute_s(tokens - MAX_PREFILL_TOKENS, tokens)
    assert met.seconds >= best.seconds - 1e-6 - max(step_s, CHUNK_TOKENS * load_s) / 4
    assert met.seconds <= min(compute_s, load_s * tokens) + step_s
    assert met.seconds <= best.seconds + step_s + CHUNK_TOKENS * load_s


def test_speedups_are_within_ten_percent_of_the_papers() -> None:
    load_s = TOKEN_BYTES / GBPS_32
    met = simulate_events(A100, load_s, 16384)
    assert load_s * 16384 / met.seconds == pytest.approx(PUBLISHED_SPEEDUPS["x_load"], rel=0.1)
    assert A100.predict_compute_s(0, 16384) / met.seconds == pytest.approx(
        PUBLISHED_SPEEDUPS["x_compute"], rel=0.1
    )
    assert H100.predict_compute_s(0, 512) == pytest.approx(0.0274)
    assert H100.predict_compute_s(63 * 512, 64 * 512) == pytest.approx(0.0935)


def test_concurrent_decoding_shifts_the_balance_to_loading() -> None:
    load_s = TOKEN_BYTES / GBPS_32
    alone, beside = (simulate_events(A100, load_s, 16384, others) for others in (0.0, 0.5))
    assert beside.computed_tokens < alone.computed_tokens and beside.seconds > alone.seconds
    assert beside.seconds < load_s * 16384


def test_prefix_command_prints_the_papers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["reduction_load_2gbps"] == pytest.approx(0.946, rel=0.1)
    assert abs(figures["x_load_off"]) < 0.1 and abs(figures["x_compute_off"]) < 0.1


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameter_count_gives_mixtrals_expert_width(model: PaperModel) -> None:
    assert model.ffn_width == 3.5 * model.hidden
    shape = model.shape
    embeddings = 2 * 32_000 * model.hidden
    assert shape.parameters - embeddings == pytest.approx(model.parameters, rel=0.03)
    assert shape.active < shape.parameters


def test_grid_contains_models_whose_experts_divide_evenly() -> None:
    assert list_grid(["O2"]) == [("W2", "O2"), ("D1", "O2"), ("D3", "O2")]
    assert build_profile("D1", SETUPS["O1"]).slow.memory_bytes < 16e9


def test_zebra_speedup_over_expert_parallelism_matches_the_paper() -> None:
    for k, source in ((4, 1 / 0.82), (32, 1.89)):
        gains = [one.zebra / one.expert_parallel for one in run_grid(ON_PREM, [k * KIB]).values()]
        assert mean(gains) == pytest.approx(source, rel=TOLERANCE)


def test_baselines_are_slower_than_zebra() -> None:
    found = run_grid(["O1"], [16 * KIB])
    assert len(found) == 4
    for one in found.values():
        assert one.disaggregated < one.expert_parallel < one.ideal < one.zebra
        assert one.pipeline is not None and one.pipeline < one.zebra


def test_hosted_experts_fill_the_bubbles_of_attention_ranks() -> None:
    none, some = compare_hosting("D1", 8 * KIB, as_published=True)
    assert none.attention_utilisation == pytest.approx(0.55, rel=TOLERANCE)
    assert none.experts_utilisation == pytest.approx(0.89, rel=TOLERANCE)
    assert some.attention_utilisation > 0.8 and some.makespan_s < none.makespan_s
    ours = compare_hosting("D1", 8 * KIB)[1]
    assert ours.makespan_s <= some.makespan_s + 1e-12


def test_deviating_figure_has_a_cause() -> None:
    near, far = PaperFigure("near", "", 1.0, 1.1), PaperFigure("dist", "", 0.55, 0.44)
    assert far.deviation == pytest.approx(-0.2)
    assert list(group_by_cause([near, far]).values()) == [["dist"]]
    unheard = PaperFigure("unheard", "", 1.0, 2.0)
    assert group_by_cause([unheard]) == {"not known": ["unheard"]}


def test_all_task_orders_are_generated() -> None:
    orders = set(generate_orders(order_attention_tasks(1, 2), 2))
    assert len(orders) == 70  # interleavings of twice four tasks
    assert tuple(order_attention_tasks(1, 2)) in orders


costs = st.builds(
    MicroBatchCosts,
    attention_s=st.floats(0.1, 1),
    experts_s=st.floats(0.1, 1),
    head_s=st.floats(0.5, 2),
    dispatch_s=st.floats(0, 0.5),
    combine_s=st.floats(0, 0.5),
    backward_factor=st.sampled_from((2.0, 3.0)),
)


@settings(max_examples=5)
@given(st.lists(costs, min_size=5, max_size=5))
def test_no_task_order_is_faster(many: list[MicroBatchCosts]) -> None:
    for one, best in zip(many, find_best_of_all(1, 2, many), strict=True):
        assert compute_makespan_s(1, 2, one) == pytest.approx(best)


@settings(max_examples=10)
@given(costs, st.integers(0, 99))
def test_no_swap_speeds_up_a_longer_step(one: MicroBatchCosts, seed: int) -> None:
    assert find_best_of_swaps(4, 3, one, 60, seed) == pytest.approx(compute_makespan_s(4, 3, one))


def test_no_swap_is_faster_with_the_papers_costs() -> None:
    one, _ = compute_plain_costs("D1", 8 * KIB)
    assert find_best_of_swaps(8, 4, one, 60, 1) == pytest.approx(compute_makespan_s(8, 4, one))


def test_another_order_wins_without_transfer_and_last_piece_costs() -> None:
    bare = MicroBatchCosts(attention_s=1.0, experts_s=0.5)
    best = find_best_of_all(1, 2, [bare])[0]
    assert 0.9 < best / compute_makespan_s(1, 2, bare) < 1
