"""How soon processes start, what they cost, and what is left of them when others die.

    python -m loadtests.start [roles mesh churn orphans ...] [--repeats 3]

Prints one flat JSON object, the figures of all parts that were named (default: all).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtests.start import churn, mesh, orphans, roles

Figures = dict[str, Any]
PARTS: dict[str, Callable[[Path, argparse.Namespace], Figures]] = {
    "roles": roles.roles,
    "mesh": mesh.mesh,
    "churn": churn.churn,
    "orphans": orphans.orphans,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each kind, each way")
    parser.add_argument("--starts", type=int, default=1000, help="through one nursery")
    parser.add_argument("--trials", type=int, default=80, help="in which somebody dies")
    parser.add_argument("--kinds", nargs="*", default=[], help="of processes; none: all")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - PARTS.keys():
        parser.error(f"no part is called {unknown.pop()}")
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="meshrl-start-") as scratch:
        for name in chosen.parts or PARTS:
            folder = Path(scratch) / name
            folder.mkdir()
            figures |= PARTS[name](folder, chosen)
            print(json.dumps(rounded(figures)), flush=True)


def rounded(figures: Figures) -> Figures:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}


if __name__ == "__main__":
    main()
