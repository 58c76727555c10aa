"""The trainer beside TRL's, beside padding, and beside itself with more ranks and helpers.

    python -m loadtests.trainer [equal longtail reward ...] [--repeats 3] [--steps 10]

Prints one flat JSON object, the figures of all parts that were named (default: all).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtests.trainer import agreement, beside_trl, elastic

Figures = dict[str, Any]
Part = Callable[[Path, argparse.Namespace], Figures]
PASSES = 9  # of each side


def packed(folder: Path, chosen: argparse.Namespace) -> Figures:
    """See `loadtests.packing`."""
    import torch  # which the other parts leave to processes of their own

    from loadtests.packing import comparing as packing

    torch.set_num_threads(1)
    plans = packing.plans(0, chosen.sequences or packing.SEQUENCES)
    return plans | packing.passes(chosen.passes, 0, chosen.trained or packing.TRAINED)


PARTS: dict[str, Part] = {
    "equal": beside_trl.equal,
    "longtail": beside_trl.longtail,
    "reward": beside_trl.reward,
    "packing": packed,
    "ranks": elastic.two_ranks,
    "hybrid": elastic.hybrid,
    "join": elastic.join,
    "checkpoint": elastic.checkpoint,
    "recovery": elastic.recovery,
    "demo": agreement.demo,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--repeats", type=int, default=3, help="of each side, in turn")
    parser.add_argument("--steps", type=int, default=10, help="that are measured in each")
    parser.add_argument("--trl", type=Path, default=beside_trl.VENV, help="TRL's environment")
    parser.add_argument("--demo", type=Path, help="the run directory of a demo; none: runs it")
    parser.add_argument("--demo-steps", type=int, default=48)
    parser.add_argument("--demo-set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--passes", type=int, default=PASSES, help="of `packing`, of each side")
    parser.add_argument("--sequences", type=int, help="of `packing`; none: as many as there")
    parser.add_argument("--trained", type=int, help="of `packing`; none: as many as there")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - PARTS.keys():
        parser.error(f"no part is called {unknown.pop()}")
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="meshrl-trainer-") as scratch:
        for name in chosen.parts or PARTS:
            folder = Path(scratch) / name
            folder.mkdir()
            figures |= PARTS[name](folder, chosen)
            print(json.dumps(rounded(figures)), flush=True)


def rounded(figures: Figures) -> Figures:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}


if __name__ == "__main__":
    main()
