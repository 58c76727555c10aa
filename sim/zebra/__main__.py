"""Zebra parallelism on the models and accelerators of HeterMoE (arXiv 2504.03871), compared with
its measurements.

Usage:

    python -m meshrl.sim.zebra

Times are those of `common/hardware/zebra`, on declared profiles that are fitted only to ratios of
kernels. The last line is JSON: `NAME`, and `NAME_off` for its relative error. It takes half a
minute.
"""

from __future__ import annotations

import json
import textwrap

from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.timeline import compute_makespan_s
from meshrl.sim.zebra.paper_figures import (
    KIB,
    TOLERANCE,
    compute_figures,
    compute_sensitivity,
    find_best_of_all,
    find_best_of_swaps,
    group_by_cause,
)
from meshrl.sim.zebra.paper_runs import compare_hosting, compute_plain_costs

EXHAUSTIVE_CASES = ((1, 2), (2, 2))  # layers and micro-batches for which all orders are tried
SWAP_COUNT = 400


def measure_order_gaps() -> dict[str, float]:
    """Measure how much any other order shortens a step of Theorem 1's order, at most."""
    many = [compute_plain_costs("D1", k * KIB)[0] for k in (4, 16)]
    # No communication, and the last piece costs nothing, unlike any model.
    bare = MicroBatchCosts(attention_s=1.0, experts_s=0.5)
    gaps: list[float] = []
    bare_gaps: list[float] = []
    for layers, micros in EXHAUSTIVE_CASES:
        best = find_best_of_all(layers, micros, [*many, bare])
        steps = [compute_makespan_s(layers, micros, costs) for costs in (*many, bare)]
        each = [1 - b / s for b, s in zip(best, steps, strict=True)]
        gaps, bare_gaps = gaps + each[:-1], bare_gaps + each[-1:]
    swapped = [
        1 - find_best_of_swaps(6, 3, costs, SWAP_COUNT, seed) / compute_makespan_s(6, 3, costs)
        for seed, costs in enumerate(many)
    ]
    return {
        "order_gap": max(gaps),
        "order_gap_swaps": max(swapped),
        "order_gap_bare": max(bare_gaps),
    }


def main() -> None:
    figures = compute_figures()
    print(f"{'':20}{'':44}{'source':>8}{'here':>8}{'off':>8}")
    for one in figures:
        print(
            f"{one.name:20}{one.description:44}{one.published:8.2f}{one.computed:8.2f}{one.deviation:8.1%}"
        )
    for cause, outliers in group_by_cause(figures).items():
        text = f"more than {TOLERANCE:.0%} off, {', '.join(outliers)}: {cause}."
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))
    moved = compute_sensitivity()
    names = list(next(iter(moved.values())))
    print(f"\n{'at 4K, 16K and 32K':26}" + "".join(f"{name:>10}" for name in names))
    for assumed, row in moved.items():
        print(f"{assumed:26}" + "".join(f"{row[name]:10.2f}" for name in names))
    gaps = measure_order_gaps()
    print(f"\nother orders of tasks save at most {gaps['order_gap']:.1%} of a step", end="")
    print(f", {gaps['order_gap_bare']:.1%} if transfers and the last piece cost nothing")
    found: dict[str, object] = {one.name: round(one.computed, 4) for one in figures}
    found |= {f"{one.name}_off": round(one.deviation, 4) for one in figures}
    for model in (
        "W1",
        "D1",
    ):  # with the experts hosted by `common/hardware/zebra/expert_hosting.py`
        none, some = compare_hosting(model, 4 * KIB)
        found[f"asym_{model.lower()}_4k_judged"] = round(none.makespan_s / some.makespan_s, 4)
    found["hidden_d1_8k"] = round(compare_hosting("D1", 8 * KIB)[0].hidden_transfer_share, 4)
    found |= {name: round(value, 4) for name, value in gaps.items()}
    found["sensitivity"] = {
        assumed: {name: round(value, 3) for name, value in row.items()}
        for assumed, row in moved.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
