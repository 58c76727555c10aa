"""Comparison of the policies of time slices, and of the default one with every order."""

from __future__ import annotations

import random
import statistics
from typing import Any

from loadtests.sharing.slice_simulation import (
    Outcome,
    Simulation,
    Source,
    Switches,
    find_best_mean_response_s,
)
from meshrl.services.node.slices.policies import DEFAULT_POLICY, POLICIES
from meshrl.services.node.slices.slice_policy import SlicePolicy

MOST_REQUESTS = 6  # of a small case: 720 orders
INSTANCES = 3
STEPS = 20  # of each instance of a workload


def compare_with_oracle(policy: SlicePolicy, cases: int, seed: int) -> list[float]:
    """Return the mean response time of a policy relative to the best order, for each case."""
    ratios = []
    for case in range(cases):
        sources, switches = draw_small_case(random.Random(f"{seed} case {case}"))
        outcome = Simulation(policy, sources, switches).run()
        best_s = find_best_mean_response_s(sources, switches)
        ratios.append(statistics.fmean(outcome.responses) / best_s)
    return ratios


def draw_small_case(draw: random.Random) -> tuple[list[Source], Switches]:
    """Draw three to six requests of two or three instances, which come while others compute."""
    names = [f"i{number}" for number in range(draw.randint(2, INSTANCES))]
    services = [draw.lognormvariate(0.0, 1.0) for _ in range(draw.randint(3, MOST_REQUESTS))]
    sources = [
        Source(draw.choice(names), [(draw.uniform(0.0, 0.7 * sum(services)), service_s)])
        for service_s in services
    ]
    return sources, draw_switches(draw, names)


def draw_switches(draw: random.Random, names: list[str]) -> Switches:
    """Draw times to load, and to offload, which takes from nothing to as long."""
    load_s = {name: draw.uniform(0.1, 2.0) for name in names}
    return Switches(load_s, {name: draw.random() * load_s[name] for name in names})


def draw_workload(draw: random.Random) -> tuple[list[Source], Switches]:
    """Draw instances whose steps are bursts of computations, with pauses between the steps."""
    names = [f"i{number}" for number in range(INSTANCES)]
    sources = []
    for name in names:
        service_s, pieces = draw.choice([0.2, 1.0, 3.0]), draw.randint(2, 12)
        pause_s = draw.uniform(0.5, 3.0) * service_s * pieces
        computations = []
        for _ in range(STEPS):
            for piece in range(pieces):
                gap_s = draw.uniform(0.001, 0.02) if piece else pause_s * draw.uniform(0.5, 1.5)
                computations.append((gap_s, service_s * draw.uniform(0.7, 1.4)))
        sources.append(Source(name, computations))
    return sources, draw_switches(draw, names)


def compare_policies(workloads: int, seed: int) -> dict[str, Any]:
    """Return flat figures of every policy, over workloads that are the same for all."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in POLICIES}
    for number in range(workloads):
        for name, policy in POLICIES.items():
            sources, switches = draw_workload(random.Random(f"{seed} workload {number}"))
            outcomes[name].append(Simulation(policy, sources, switches).run())
    found: dict[str, Any] = {}
    for name, runs in outcomes.items():
        ours = outcomes[DEFAULT_POLICY]
        waits = [wait for run in runs for wait in run.waits]
        found |= {
            f"{name}_makespan_ratio": statistics.median(
                run.makespan / our.makespan for run, our in zip(runs, ours, strict=True)
            ),
            f"{name}_wait_p99_s": statistics.quantiles(waits, n=100)[98],
            f"{name}_response_mean_s": statistics.fmean(r for run in runs for r in run.responses),
            f"{name}_switch_share": sum(run.switching for run in runs)
            / sum(run.makespan for run in runs),
        }
    return found


def measure_policies(cases: int, workloads: int, seed: int) -> dict[str, Any]:
    """Return the figures of the part `policies`."""
    found: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        ratios = sorted(compare_with_oracle(policy, cases, seed))
        found[f"{name}_over_oracle"] = statistics.median(ratios)
        found[f"{name}_over_oracle_p95"] = ratios[int(0.95 * (len(ratios) - 1))]
    return found | compare_policies(workloads, seed)
