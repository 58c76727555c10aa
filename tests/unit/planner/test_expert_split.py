"""Expert splits of a MoE core: chosen where predicted to pay, measured, and undone otherwise."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from meshrl.common.base.encoding.json_values import from_json_value, to_json_value
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.hardware.zebra.declared_profiles import build_declared_profile
from meshrl.common.state.pool.demand.measurements import (
    QUANTILES,
    LengthQuantiles,
    MeasuredWork,
    Measurements,
)
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Decision, PlaceInstance
from meshrl.common.state.pool.store.planner_reports import decode_predictions
from meshrl.common.state.pool.workers.rows import (
    ExpertSplit,
    Instance,
    InstancePhase,
    InstanceReport,
    Tier,
)
from meshrl.services.planner.costs.expert_split_prediction import (
    ExpertSplitPrediction,
    predict_expert_split,
)
from meshrl.services.planner.policies.expert_split import ExpertSplitState
from tests.unit.planner.pools import QUIET, PlannerBench, job, pool

K = 1024
# Like D1 of `sim/zebra`: eight layers, 24 experts of which a token goes to two.
SHAPE = ModelShape(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=8,
    head_dim=128,
    parameters=1.17e9,
    active=1.17e9 - 8 * 22 * 3 * 1024 * 1536,
    experts=24,
    experts_per_token=2,
)
TWO_KINDS = ["cuda:0 NVIDIA A40"] * 2 + ["cuda:0 Tesla V100-SXM2-32GB"] * 5


def mixed(kinds: list[str], *, up_ms: int = 0, **about: Any) -> PlannerBench:
    """Return a mesh with these accelerators, whose job has a core of four ranks."""
    needs: dict[str, Any] = {
        "ranks": 4,
        "auto_expert_split": True,
        "model_shape": SHAPE,
        "bin_tokens": 16 * K,
    }
    planned = job(**(needs | {"model_key": "D1", "has_checkpoint": True} | about))
    bench = PlannerBench(pool([len(kinds)], planned, settings=QUIET, up_since_ms=up_ms))
    for number, accelerator in enumerate(kinds):
        bench.update_worker(f"w{number}", accelerator=accelerator)
    return bench


def start_mixed_pool(kinds: list[str] = TWO_KINDS, **about: Any) -> PlannerBench:
    """Return a mesh with these accelerators after all initial decisions."""
    bench = mixed(kinds, **about)
    bench.settle()
    return bench


def core(bench: PlannerBench) -> Instance:
    [found] = [resident for _, resident in bench.list_instances() if resident.core]
    return found


def list_core_kinds(bench: PlannerBench) -> list[str]:
    """Return the accelerator kinds of the core's ranks."""
    [gang] = [g for g in bench.snapshot.gangs if any(r.core for r in g.instances)]
    known = {worker.id: worker.accelerator for worker in bench.snapshot.workers}
    [ranks] = [r.ranks for r in gang.instances if r.core]
    return ["A40" if "A40" in known[gang.workers[rank]] else "V100" for rank in ranks]


def report_training_rate(
    bench: PlannerBench, tokens_per_s: float, steps: float, start: str = ""
) -> None:
    """Report this training rate of the core in each of so many seconds, with one step each."""
    work = MeasuredWork(steps=steps, busy_s=steps, tokens=tokens_per_s * steps)
    about = bench.snapshot.jobs[0].measurements
    bench.update_job(
        "job",
        measurements=replace(
            about, work_by_process={f"trainer/job{start or core(bench).id}": work}
        ),
    )


def run_window(bench: PlannerBench, tokens_per_s: float) -> list[Decision]:
    """Run a window of steps and return the decisions made in it."""
    found: list[Decision] = []
    for steps in (2, 4, 6, 8):
        report_training_rate(bench, tokens_per_s, steps)
        found += bench.decide_once()
    return found


def cover_removals(bench: PlannerBench) -> None:
    """Report each instance that is to be absent as covered by a checkpoint."""
    gangs = []
    for gang in bench.snapshot.gangs:
        some = tuple(
            r if r.tier != Tier.ABSENT else replace(r, reports=make_reports(r))
            for r in gang.instances
        )
        gangs.append(replace(gang, instances=some))
    bench.update(gangs=tuple(gangs))


def make_reports(r: Instance) -> dict[int, InstanceReport]:
    one = InstanceReport(0, r.generation, r.epoch, 1, InstancePhase.GONE, Tier.ABSENT)
    return {rank: replace(one, rank=rank) for rank in r.ranks}


def ranks_told(bench: PlannerBench) -> str:
    return decode_predictions(bench.memory.encode())["job"].expert_split_reason


def test_experts_are_split_where_a_gain_is_predicted() -> None:
    bench = start_mixed_pool()
    apart = core(bench).expert_split
    assert apart is not None and 1 <= apart.attention_ranks <= 3
    assert list_core_kinds(bench) == ["A40"] * apart.attention_ranks + ["V100"] * (
        4 - apart.attention_ranks
    )
    reasons_given = ranks_told(bench)
    assert f"attention on {apart.attention_ranks} ranks of A40 and experts on V100" in reasons_given
    assert "from declared figures" in reasons_given and "with uniform ranks" in reasons_given


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        (["cuda:0 NVIDIA A40"] * 8, "lacks accelerators of two known kinds"),
        (
            ["cuda:0 NVIDIA A40"] * 4 + ["cuda:0 Something"] * 4,
            "lacks accelerators of two known kinds",
        ),
    ],
)
def test_single_kind_is_not_split_and_the_reason_is_given(kinds: list[str], why: str) -> None:
    bench = start_mixed_pool(kinds)
    assert core(bench).expert_split is None
    assert why in ranks_told(bench)


def test_enough_fast_accelerators_train_alone() -> None:
    bench = start_mixed_pool(["cuda:0 Tesla T4"] * 4 + ["cuda:0 NVIDIA H100"] * 4)
    assert core(bench).expert_split is None
    [gang] = [g for g in bench.snapshot.gangs if any(r.core for r in g.instances)]
    assert gang.workers == ("w4", "w5", "w6", "w7")


def test_job_without_the_option_is_not_split() -> None:
    bench = start_mixed_pool(auto_expert_split=False)
    assert core(bench).expert_split is None
    assert not bench.memory.expert_splits


def test_split_waits_for_a_new_mesh() -> None:
    bench = mixed(TWO_KINDS[:5], up_ms=999_000)
    bench.update(settings=replace(QUIET, join_grace_s=5.0))
    bench.decide_once()
    assert not bench.memory.expert_splits, "the slow ones may still be coming"


def test_lost_core_is_replaced_with_an_equal_split() -> None:
    bench = start_mixed_pool()
    before = core(bench).expert_split
    declared = build_declared_profile(SHAPE, "A40", "T4")
    ranks_with_experts = [replace(declared.fast), replace(declared.slow, name="V100")]
    profiles = {kind.name: {"kind": asdict(kind), "backward": 2.0} for kind in ranks_with_experts}
    bench.update_job("job", measurements=Measurements(profiles=profiles))
    bench.decide_once()
    assert bench.memory.expert_splits["job"].predicted_split != before, (
        "it would be another one now"
    )
    [gang] = [g for g in bench.snapshot.gangs if any(r.core for r in g.instances)]
    bench.update_worker(gang.workers[0], alive=False)
    bench.update(now_ms=bench.snapshot.now_ms + 60_000)
    bench.decide_once()
    bench.update(now_ms=bench.snapshot.now_ms + 60_000)
    bench.settle()
    assert gang.workers[0] not in bench.roles() and core(bench).expert_split == before


def test_split_that_meets_its_prediction_stays() -> None:
    bench = start_mixed_pool()
    mixture = bench.memory.expert_splits["job"]
    run_window(bench, mixture.predicted_tokens_per_s)
    assert (
        core(bench).tier == Tier.ACCELERATOR and core(bench).expert_split == mixture.predicted_split
    )
    assert "observed" in ranks_told(bench)


def test_split_slower_than_uniform_ranks_is_undone() -> None:
    bench = start_mixed_pool()
    mixture = bench.memory.expert_splits["job"]
    first = core(bench)
    run_window(bench, mixture.uniform_tokens_per_s / 2)
    assert core(bench).id == first.id and core(bench).tier == Tier.ABSENT
    bench.decide_once()
    assert core(bench).tier == Tier.ABSENT, "it writes its checkpoint"
    cover_removals(bench)
    bench.settle()
    second = core(bench)
    assert second.id != first.id and second.expert_split is None
    run_window(bench, mixture.uniform_tokens_per_s / 4)  # it is worse still
    cover_removals(bench)
    bench.settle()
    assert core(bench).expert_split == first.expert_split
    run_window(bench, mixture.uniform_tokens_per_s / 2)
    assert core(bench).tier == Tier.ACCELERATOR, "the best that was measured stays"


def test_measured_profiles_override_declared_ones() -> None:
    bench = start_mixed_pool()
    before = bench.memory.expert_splits["job"]
    assert not before.is_measured
    declared = build_declared_profile(SHAPE, "A40", "V100")
    slower = replace(
        declared.slow,
        experts=replace(declared.slow.experts, seconds=(declared.slow.experts.seconds[0] * 4,)),
    )
    profiles = {
        kind.name: {"kind": asdict(kind), "backward": 2.0} for kind in (declared.fast, slower)
    }
    bench.update_job("job", measurements=Measurements(profiles=profiles))
    bench.decide_once()
    after = bench.memory.expert_splits["job"]
    assert after.is_measured and after.predicted_tokens_per_s < before.predicted_tokens_per_s
    assert sum(after.predicted_split.hosted_experts) > sum(before.predicted_split.hosted_experts)  # type: ignore[union-attr]
    assert core(bench).expert_split == before.predicted_split, "nothing has been measured of it yet"
    run_window(bench, after.predicted_tokens_per_s / 2)
    cover_removals(bench)
    bench.settle()
    assert core(bench).expert_split in (after.predicted_split, None)
    assert "from measurements" in ranks_told(bench)


def test_split_without_predicted_gain_is_not_tried_after_overestimates() -> None:
    bench = start_mixed_pool(["cuda:0 NVIDIA A40"] * 4 + ["cuda:0 Tesla V100-SXM2-32GB"] * 4)
    mixture = bench.memory.expert_splits["job"]
    assert core(bench).expert_split is None and mixture.predicted_split is not None
    assert mixture.predicted_tokens_per_s < mixture.uniform_tokens_per_s
    run_window(bench, mixture.uniform_tokens_per_s / 10)
    assert core(bench).expert_split is None and core(bench).tier == Tier.ACCELERATOR


def test_core_without_a_checkpoint_is_not_split_again() -> None:
    bench = start_mixed_pool(has_checkpoint=False)
    run_window(bench, 1.0)
    assert core(bench).tier == Tier.ACCELERATOR


def test_core_without_a_possible_checkpoint_continues() -> None:
    bench = start_mixed_pool()
    first = core(bench)
    run_window(bench, 1.0)
    bench.update(now_ms=bench.snapshot.now_ms + 1000 * 121)
    bench.decide_once()
    assert core(bench).id == first.id and core(bench).tier == Tier.ACCELERATOR
    assert "could not be saved as a checkpoint" in ranks_told(bench)
    run_window(bench, 1.0)
    assert core(bench).tier == Tier.ACCELERATOR


def test_planner_memory_retains_the_split() -> None:
    apart = ExpertSplit(2, 4, (0, 1, 2))
    full = ExpertSplitState(
        apart,
        apart,
        ("A40", "V100"),
        10.0,
        8.0,
        True,
        True,
        {(): 5.0, (2, 4, 0, 1, 2): 6.0},
        ("trainer/job", MeasuredWork(steps=3, busy_s=2.5, held_s=0.5, tokens=100)),
        1,
        "",
        True,
    )
    assert from_json_value(ExpertSplitState, to_json_value(full)) == full
    assert (
        from_json_value(ExpertSplitState, to_json_value(ExpertSplitState())) == ExpertSplitState()
    )


def test_longer_sequences_get_more_attention_ranks() -> None:
    """Check that longer sequences get more attention ranks: declared attention cost grows faster
    than that of experts.
    """

    def split_for_tokens(tokens: float) -> PlannedJob:
        lengths = LengthQuantiles(100, tuple([tokens] * 16))
        measured = Measurements(lengths=lengths)
        return job(
            ranks=6,
            auto_expert_split=True,
            model_shape=SHAPE,
            bin_tokens=32 * K,
            measurements=measured,
        )

    there = {"A40": 5, "V100": 5}
    short, long = (
        predict_expert_split(split_for_tokens(tokens), there) for tokens in (1.0 * K, 32.0 * K)
    )
    assert isinstance(short, ExpertSplitPrediction) and isinstance(long, ExpertSplitPrediction)
    assert short.expert_split.attention_ranks < long.expert_split.attention_ranks


def test_placement_rationale_contains_its_inputs() -> None:
    bench = start_mixed_pool()
    found = run_window(bench, 1.0)
    [place] = [one for one in found if isinstance(one, PlaceInstance) and one.instance.core]
    assert place.rationale.rule == "mixture" and place.rationale.inputs["predicted"] > 0


def test_emulated_speed_scales_the_prediction() -> None:
    bench, paced = start_mixed_pool(), start_mixed_pool(emulated_training="declared/50")
    own, slower = bench.memory.expert_splits["job"], paced.memory.expert_splits["job"]
    assert slower.predicted_tokens_per_s == pytest.approx(own.predicted_tokens_per_s / 50)
    assert slower.uniform_tokens_per_s == pytest.approx(own.uniform_tokens_per_s / 50)
    assert slower.predicted_split == own.predicted_split
    long = start_mixed_pool(emulated_training="declared/1/2", bin_tokens=8 * K)
    assert long.memory.expert_splits["job"].predicted_tokens_per_s == pytest.approx(
        own.predicted_tokens_per_s / 2
    )


def test_split_is_predicted_again_after_lengths_are_sampled() -> None:
    bench = start_mixed_pool()
    before = bench.memory.expert_splits["job"]
    longer = LengthQuantiles(100, (12.0 * K,) * len(QUANTILES), 2.0 * K)
    bench.update_job("job", measurements=Measurements(lengths=longer))
    bench.decide_once()
    after = bench.memory.expert_splits["job"]
    assert not before.has_sampled_lengths and after.has_sampled_lengths
    assert after.predicted_tokens_per_s < before.predicted_tokens_per_s, (
        "attention of long sequences takes longer"
    )
    assert from_json_value(ExpertSplitState, to_json_value(after)) == after
    bench.update_job("job", measurements=Measurements())
    bench.decide_once()
    assert bench.memory.expert_splits["job"] == after, "what is known stays known"


def test_splits_are_evaluated_again_only_on_changed_input() -> None:
    """Check that divisions are priced again only on changed input. The verdict that none fits is
    marked, so that a second one would show.
    """
    bench = mixed(TWO_KINDS, model_shape=replace(SHAPE, parameters=1e12, active=2e11))
    lengths = LengthQuantiles(100, (2.0 * K,) * len(QUANTILES), 1.0 * K)
    bench.update_job("job", measurements=Measurements(lengths=lengths))
    bench.settle()

    def count_marked(**about: Any) -> str:
        marked = replace(bench.memory.expert_splits["job"], reason="marked")
        bench.memory = replace(bench.memory, expert_splits={"job": marked})
        bench.update_job("job", **about)
        bench.decide_once()
        return bench.memory.expert_splits["job"].reason

    near = replace(lengths, trajectories=200, mean_prompt_tokens=1.01 * K)
    assert count_marked() == count_marked(measurements=Measurements(lengths=near)) == "marked"
    longer = replace(lengths, sampled_tokens=(4.0 * K,) * len(QUANTILES))
    for change in ({"measurements": Measurements(lengths=longer)}, {"group_size": 3}):
        assert "no division of 4 ranks" in count_marked(**change)
