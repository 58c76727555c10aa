"""Figures of the model beside the measurements of HeterMoE (arXiv 2504.03871). No parameter is
fitted to these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import NamedTuple, TypeAlias

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.operations import plan_operations, simulate_plan_s
from meshrl.common.hardware.zebra.schedule import (
    ScheduledTask,
    order_attention_tasks,
    order_expert_tasks,
)
from meshrl.common.hardware.zebra.timeline import compute_makespan_s
from meshrl.sim.zebra import baselines
from meshrl.sim.zebra.paper_runs import PaperRun, compare_hosting, run_on_setup, run_setup
from meshrl.sim.zebra.paper_setups import (
    CLOUD,
    DEFAULT_ASSUMPTIONS,
    MODELS,
    ON_PREM,
    ROCE_LINK,
    PaperAssumptions,
    PaperSetup,
    build_profile,
    list_grid,
)


def generate_orders(
    tasks: Sequence[ScheduledTask], micro_batches: int
) -> Iterator[tuple[ScheduledTask, ...]]:
    """Yield every order that keeps each micro-batch's own order."""
    queues = [
        [task for task in tasks if task.micro_batch == micro] for micro in range(micro_batches)
    ]

    def merged(at: tuple[int, ...]) -> Iterator[tuple[ScheduledTask, ...]]:
        is_complete = True
        for micro, queue in enumerate(queues):
            if at[micro] < len(queue):
                is_complete = False
                after = (*at[:micro], at[micro] + 1, *at[micro + 1 :])
                for rest in merged(after):
                    yield (queue[at[micro]], *rest)
        if is_complete:
            yield ()

    return merged((0,) * micro_batches)


def find_best_of_all(
    layers: int, micro_batches: int, many: Sequence[MicroBatchCosts]
) -> list[float]:
    """Find the shortest step of any order on attention ranks and on expert ranks, for each of the
    costs. Micro-batches are equal, so the first piece runs in order of their numbers.
    """
    best = [float("inf")] * len(many)
    first = [
        task
        for task in order_attention_tasks(layers, micro_batches)
        if not (task.layer or task.backward)
    ]
    attention = [
        order
        for order in generate_orders(order_attention_tasks(layers, micro_batches), micro_batches)
        if [task for task in order if task in first] == first
    ]
    experts = list(generate_orders(order_expert_tasks(layers, micro_batches), micro_batches))
    for pair in product(attention, experts):
        for i, step_s in enumerate(_compute_step_times(layers, pair, many)):
            best[i] = min(best[i], step_s)
    return best


def find_best_of_swaps(
    layers: int, micro_batches: int, costs: MicroBatchCosts, swap_count: int, seed: int
) -> float:
    """Find the shortest step by `swap_count` swaps of neighbours, alternately on attention and
    expert ranks. Swaps that make it longer are undone.
    """
    random = Random(seed)
    orders = [
        order_attention_tasks(layers, micro_batches),
        order_expert_tasks(layers, micro_batches),
    ]
    best = compute_makespan_s(layers, micro_batches, costs)
    for swap in range(swap_count):
        order = orders[swap % 2]
        at = random.randrange(len(order) - 1)
        if order[at].micro_batch == order[at + 1].micro_batch:
            continue
        order[at], order[at + 1] = order[at + 1], order[at]
        step_s = next(iter(_compute_step_times(layers, orders, [costs])), float("inf"))
        if step_s > best:
            order[at], order[at + 1] = order[at + 1], order[at]
        best = min(best, step_s)
    return best


def _compute_step_times(
    layers: int, orders: Sequence[Sequence[ScheduledTask]], many: Sequence[MicroBatchCosts]
) -> list[float]:
    """Compute the seconds with each of the costs; none if tasks wait for each other."""
    try:
        plan = plan_operations(layers, *orders)
    except ConfigError:
        return []
    return [simulate_plan_s(layers, plan, costs) for costs in many]


KIB = 1024
SEQUENCE_LENGTHS = tuple(k * KIB for k in (4, 8, 12, 16, 20, 24, 32))
SELECTED_LENGTHS = tuple(k * KIB for k in (4, 16, 32))
TOLERANCE = 0.15  # relative to the published figure
IDEAL_CAUSE = (
    "inferred: streams lose nothing here, to launches, uneven routing or ranks that are late. The "
    "source's V100 compute for 89 % of a step in which ours do for 96 %"
)
SERIAL_CAUSE = (
    f"{IDEAL_CAUSE}. All transfers here take the network, too, and none a bus within a host"
)
BUBBLE_CAUSE = (
    "a pipeline's bubbles shrink with the batch, whose size is unknown. With twice the "
    "sequences the mean over 4K, 16K and 32K is 1.42"
)
DEVIATION_CAUSES = {
    "dist": SERIAL_CAUSE,
    "cloud_dist": SERIAL_CAUSE,
    "pipeline": BUBBLE_CAUSE,
    "pipeline_max": BUBBLE_CAUSE,
    "busy_a40_8k_asym": IDEAL_CAUSE,
    "busy_a40_16k_asym": IDEAL_CAUSE,
    "ep_32k_d1_largest": "the source does not state the setup. On O1 it is 2.17",
}
RunKey: TypeAlias = tuple[str, str, int]  # model, setup, length


class PaperFigure(NamedTuple):
    """Figure of the model and of the source."""

    name: str
    description: str
    published: float
    computed: float

    @property
    def deviation(self) -> float:
        return self.computed / self.published - 1


def run_grid(
    setups: Sequence[str], lengths: Sequence[int], assumed: PaperAssumptions = DEFAULT_ASSUMPTIONS
) -> dict[RunKey, PaperRun]:
    found = {
        (model, setup, length): run_setup(model, setup, length, assumed)
        for (model, setup), length in product(list_grid(setups), lengths)
    }
    return {key: one for key, one in found.items() if one is not None}


def compute_figures(lengths: Sequence[int] = SEQUENCE_LENGTHS) -> list[PaperFigure]:
    """Compute all figures; means are over the lengths."""
    return [
        *_compute_on_prem(lengths),
        *_compute_cloud(lengths),
        *_compute_four_gpus(lengths),
        *_compute_asymmetric(),
    ]


def group_by_cause(figures: Sequence[PaperFigure]) -> dict[str, list[str]]:
    """Group figures beyond `TOLERANCE` by the known cause of their error."""
    found: dict[str, list[str]] = {}
    for one in figures:
        if abs(one.deviation) > TOLERANCE:
            found.setdefault(DEVIATION_CAUSES.get(one.name, "not known"), []).append(one.name)
    return found


def compute_sensitivity() -> dict[str, dict[str, float]]:
    """Compute the change of figures with each assumption."""
    variants = {
        "as assumed": DEFAULT_ASSUMPTIONS,
        "30 % of peaks": replace(DEFAULT_ASSUMPTIONS, utilisation=0.3),
        "60 % of peaks": replace(DEFAULT_ASSUMPTIONS, utilisation=0.6),
        "scores at 0.7 of that": replace(DEFAULT_ASSUMPTIONS, attention_speed_factor=0.7),
        "links half as fast": replace(DEFAULT_ASSUMPTIONS, link_factor=0.5),
        "links twice as fast": replace(DEFAULT_ASSUMPTIONS, link_factor=2.0),
        "backward twice a forward": replace(DEFAULT_ASSUMPTIONS, backward_factor=2.0),
        "twice the sequences": replace(
            DEFAULT_ASSUMPTIONS, sequences=2 * DEFAULT_ASSUMPTIONS.sequences
        ),
    }
    moved: dict[str, dict[str, float]] = {}
    for name, assumed in variants.items():
        found = run_grid(ON_PREM, SELECTED_LENGTHS, assumed)
        moved[name] = {
            f"ep_{n // KIB}k": mean(_collect_ratios(found, _speedup_over_ep, length=n))
            for n in SELECTED_LENGTHS
        } | {
            "dist": mean(one.disaggregated / one.zebra for one in found.values()),
            "ideal": mean(_collect_ratios(found, _speedup_over_ideal)),
            "pipeline": mean(_speedups_over_pipeline(found)),
        }
    return moved


def _compute_on_prem(lengths: Sequence[int]) -> Iterator[PaperFigure]:
    found = run_grid(ON_PREM, sorted({*lengths, *SELECTED_LENGTHS}))
    for k, source in ((4, 1 / 0.82), (16, 1.67), (32, 1.89)):
        gains = _collect_ratios(found, _speedup_over_ep, length=k * KIB)
        yield PaperFigure(f"ep_{k}k", f"over EP, {k}K, mean", source, mean(gains))
    for model, source in (("D1", 2.05), ("D2", 2.29)):
        gains = _collect_ratios(found, _speedup_over_ep, model, 32 * KIB)
        for name, ours in (("largest", max(gains)), ("mean", mean(gains))):
            about = f"over EP, 32K, {model}, {name} of setups"
            yield PaperFigure(f"ep_32k_{model.lower()}_{name}", about, source, ours)
    some = {key: one for key, one in found.items() if key[2] in lengths}
    slower = mean(one.disaggregated / one.zebra for one in some.values())
    yield PaperFigure("dist", "DistEP as a share of ZP, mean", 0.55, slower)
    ideals = _collect_ratios(some, _speedup_over_ideal)
    yield PaperFigure("ideal", "over EP(Ideal), mean", 1.18, mean(ideals))
    yield PaperFigure("ideal_max", "over EP(Ideal), largest", 1.38, max(ideals))
    yield PaperFigure("ideal_min", "over EP(Ideal), least", 0.97, min(ideals))
    yield PaperFigure("pipeline", "over PP, mean", 1.28, mean(_speedups_over_pipeline(some)))
    yield PaperFigure("pipeline_max", "over PP, largest", 1.47, max(_speedups_over_pipeline(some)))


def _compute_cloud(lengths: Sequence[int]) -> Iterator[PaperFigure]:
    found = run_grid(CLOUD, lengths)
    ideals = _collect_ratios(found, _speedup_over_ideal)
    yield PaperFigure("cloud_ideal", "L40S and T4: over EP(Ideal), mean", 1.17, mean(ideals))
    yield PaperFigure("cloud_ideal_max", "L40S and T4: over EP(Ideal), largest", 1.25, max(ideals))
    yield PaperFigure(
        "cloud_ep",
        "L40S and T4: over EP, mean",
        2.89,
        mean(_collect_ratios(found, _speedup_over_ep)),
    )
    faster = mean(one.zebra / one.disaggregated for one in found.values())
    yield PaperFigure("cloud_dist", "L40S and T4: over DistEP, mean", 1.96, faster)


def _compute_four_gpus(lengths: Sequence[int]) -> Iterator[PaperFigure]:
    """Compare two of either kind with four of one, at the same step."""
    mixed, newer = (PaperSetup(kind, kind, "V100", 2, 2, ROCE_LINK) for kind in ("A40", "A100"))
    shares: dict[str, list[float]] = {"A40": [], "V100": [], "A100": []}
    for model, length in product(MODELS, lengths):
        one = run_on_setup(mixed, model, length)
        if one is None:
            continue
        costs, step = build_profile(model, mixed), mixed.count_lengths(length)
        kinds = {"A40": (costs.fast, 4), "V100": (costs.slow, 4)}
        kinds["A100"] = (build_profile(model, newer).fast, 2)
        for name, (kind, count) in kinds.items():
            baseline_rate = baselines.rate_expert_parallel(costs, step, [kind], count)
            shares[name].append(one.zebra / baseline_rate)
    yield PaperFigure("four_a40", "2 A40 + 2 V100 over 4 A40", 0.95, mean(shares["A40"]))
    yield PaperFigure("four_v100", "2 A40 + 2 V100 over 4 V100", 1.66, mean(shares["V100"]))
    faster = mean(1 / share for share in shares["A100"])
    yield PaperFigure("two_a100", "2 A100 over 2 A40 + 2 V100", 1.14, faster)


def _compute_asymmetric() -> Iterator[PaperFigure]:
    """Compare hosted experts on attention ranks with none, on 6 A40 and 6 V100."""
    for model, k, source in (("W1", 4, 1.20), ("D1", 4, 1.14), ("W1", 24, 1.04)):
        none, some = compare_hosting(model, k * KIB, as_published=True)
        name, about = f"asym_{model.lower()}_{k}k", f"Asym-EA over none, {model}, {k}K"
        yield PaperFigure(name, about, source, none.makespan_s / some.makespan_s)
    for k, sources in ((8, (0.55, 0.83, 0.89, 0.78)), (16, (0.77, 0.86, 0.89, 0.84))):
        none, some = compare_hosting("D1", k * KIB, as_published=True)
        ours = (
            none.attention_utilisation,
            some.attention_utilisation,
            none.experts_utilisation,
            some.experts_utilisation,
        )
        which = (("a40", "none"), ("a40", "asym"), ("v100", "none"), ("v100", "asym"))
        for (kind, way), source, share in zip(which, sources, ours, strict=True):
            about = f"{kind.upper()} busy, D1, {k}K, {'Asym-EA' if way == 'asym' else 'none'}"
            yield PaperFigure(f"busy_{kind}_{k}k_{way}", about, source, share)


def _collect_ratios(
    found: Mapping[RunKey, PaperRun],
    ratio: Callable[[PaperRun], float],
    model: str = "",
    length: int = 0,
) -> list[float]:
    """Collect a ratio of all runs, or of those of a model or a length."""
    return [
        ratio(one)
        for (of, _, at), one in found.items()
        if of == (model or of) and at == (length or at)
    ]


def _speedup_over_ep(one: PaperRun) -> float:
    return one.zebra / one.expert_parallel


def _speedup_over_ideal(one: PaperRun) -> float:
    return one.zebra / one.ideal


def _speedups_over_pipeline(found: Mapping[RunKey, PaperRun]) -> list[float]:
    return [one.zebra / one.pipeline for one in found.values() if one.pipeline]
