"""Benchmark of attention on two A40 and experts on two V100, beside arms that do not divide them.

Usage:

    python -m loadtests.zebra [--rounds 7] [--settings D1:4096 D1:16384 D1:20480]

Four processes compute real gradients of a small mixture; each of their tasks and transfers takes
what it would on the accelerator that the process stands for, at a model and a length of HeterMoE's
(arXiv 2504.03871). Arms, in rotating order: `zebra`, with four micro-batches between both classes;
`free`, the same where transfers take no time; `distep`, without overlap; `ep`, expert parallelism
over all four; `asymmetric`, with some experts on the fast ones. Ratios are medians over rounds of
what another arm took over what `zebra` did (`ratio_asym`: `zebra` over `asymmetric`).
`overlap_share`: of the seconds of transfers, those by which a step is not
longer than one of `free`. The last line is one flat JSON object, whose figures begin with their
setting: `D1_4096_ratio_ep`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from statistics import median
from typing import Any

from loadtests.measuring.entry import flat, options, report
from loadtests.measuring.metered import HostMeter
from loadtests.measuring.processes import environment
from loadtests.measuring.rounds import ratios
from loadtests.zebra.gang import COUNT, LONGEST_S, TOKENS, Setting, arms

SETTINGS = ("D1:4096", "D1:16384", "D1:20480")
MOST_CORES = 1.2  # of the ranks
MOST_LATE = 0.03
RANKS = 2 * COUNT


def main() -> None:
    parser = options(
        __doc__,
        rounds=7,
        settings=[*SETTINGS],
        tokens=(TOKENS, "of a real micro-batch"),
        longest_s=(LONGEST_S, "of a task"),
    )
    chosen = parser.parse_args()
    use = HostMeter()
    found: dict[str, Any] = {}
    for text in chosen.settings:
        model, _, length = text.partition(":")
        name = f"{model}_{length}"
        setting = Setting(model, int(length), chosen.tokens, chosen.longest_s)
        found[name] = figures(setting, chosen.rounds)
        print(name, json.dumps(found[name]), flush=True)
    valid = min(figures["valid"] for figures in found.values())
    report(flat(found) | use.reading() | {"valid": valid})


def figures(setting: Setting, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="zebra") as directory:
        words = [directory, json.dumps(asdict(setting)), str(rounds)]
        command = [sys.executable, "-m", "loadtests.zebra.gang", *words]
        pipe = subprocess.PIPE
        gang = subprocess.run(command, check=True, env=environment(), stdout=pipe)
    ranks = json.loads(gang.stdout.splitlines()[-1])
    names = [arm.name for arm in arms(setting)]
    steps = {
        name: [
            [one for one in rank["steps"] if one["arm"] == name and one["round"] == number]
            for number in range(rounds)
            for rank in ranks
        ]
        for name in names
    }
    took = {
        name: [
            max(steps[name][number * RANKS + rank][0]["step_s"] for rank in range(RANKS))
            for number in range(rounds)
        ]
        for name in names
    }
    told: dict[str, Any] = {f"{name}_s": round(median(took[name]), 3) for name in names}
    for ratio, other, base in (
        ("ratio_ep", "ep", "zebra"),
        ("ratio_distep", "distep", "zebra"),
        ("ratio_asym", "zebra", "asymmetric"),
    ):
        if other in took and base in took:
            told[ratio] = round(median(ratios(took[other], took[base])), 3)
    told |= beside_the_simulator(setting, steps, told)
    cores, paced = sum(rank["cores"] for rank in ranks), sum(rank["paced"] for rank in ranks)
    told["late_share"] = round(sum(rank["late"] for rank in ranks) / paced, 4)
    told["rank_cores"] = round(cores, 3)
    told["valid"] = int(cores <= MOST_CORES and told["late_share"] <= MOST_LATE)
    return told


def beside_the_simulator(
    setting: Setting, steps: dict[str, Any], told: dict[str, Any]
) -> dict[str, Any]:
    """Compare utilisation, hidden transfers and ratios with the list schedule."""
    plain = setting.simulated(asymmetric=False)
    simulated = setting.serial_s / plain.makespan_s
    found: dict[str, Any] = {
        "ratio_distep_simulated": round(simulated, 3),
        "ratio_distep_share": round(told["ratio_distep"] / simulated, 3),
    }
    errors = []
    for name in ("zebra", "asymmetric"):
        if name not in steps:
            continue
        expected = setting.simulated(asymmetric=name == "asymmetric")
        for ranks, wanted in (
            (range(COUNT), expected.attention_utilisation),
            (range(COUNT, RANKS), expected.experts_utilisation),
        ):
            busy = [
                sum(b - a for a, b in one["spans"]) / one["step_s"]
                for at, (one,) in enumerate(steps[name])
                if at % RANKS in ranks
            ]
            errors.append(abs(median(busy) - wanted))
    found["utilisation_error"] = round(max(errors), 3)
    sent = [sum(b - a for a, b in one["transfers"]) for (one,) in steps["zebra"]]
    both = median(sent[0::RANKS]) + median(sent[RANKS - 1 :: RANKS])  # one rank's of either class
    found["overlap_share"] = round(1 - (told["zebra_s"] - told["free_s"]) / both, 3)
    return found


if __name__ == "__main__":
    main()
