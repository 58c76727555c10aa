"""What of the corpora of escapes and forgeries gets out or is paid, by tier, as JSON.

Each family runs in a process of its own, and hostile programs only inside of jails. It takes root
for all tiers. `python -m loadtests.escapes`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtests.measuring.flat import flat
from services.sandbox.isolation import cgroups
from tests.unit.sandbox.escapes import corpus
from tests.unit.sandbox.escapes.runner import ALL, FORGING, POISONING

ROOT = Path(__file__).parents[1]
RUNNER = [sys.executable, "-m", "tests.unit.sandbox.escapes.runner"]
PLAIN = [sys.executable, "-m", "tests.unit.sandbox.plain_user"]
FAMILY_S = 900.0  # far beyond what one takes on a busy host


def tiers() -> dict[str, list[str]]:
    """Name -> how its runner is started: as root with control groups, and as a plain user."""
    root = os.getuid() == 0
    found = {"cgroup": RUNNER} if root and cgroups.find() is not None else {}
    plain = [*PLAIN, *RUNNER] if root else RUNNER
    return {**found, "bwrap": plain, "landlock": plain}


def ran(tier: str, command: list[str], family: str, canary: Path) -> dict[str, Any]:
    """One family: its results, and what is not as it was outside."""
    argv = [*command, tier, str(canary), family, ALL]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=FAMILY_S)
    if done.returncode:
        raise RuntimeError(f"{family} in {tier}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["families"][0]
    return found


def main(chosen: list[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="canary-") as directory:
        Path(directory).chmod(0o755)
        canary = Path(directory) / "canary"
        canary.write_text("untouched")
        for tier, command in tiers().items():
            if chosen and tier not in chosen:
                continue
            escapes = [ran(tier, command, each, canary) for each in corpus.FAMILIES]
            forged = [ran(tier, command, each, canary) for each in FORGING]
            poisons = [ran(tier, command, POISONING, canary)]
            figures[tier] = {
                **_counted(escapes + poisons, "programs", "escaped"),
                **_counted(forged, "forgeries", "forged"),
                "harm": [text for found in escapes + forged + poisons for text in found["harm"]],
            }
    return flat(figures) | {
        "programs": max(figure["programs"] for figure in figures.values()),
        "escaped": sum(len(figure["escaped"]) for figure in figures.values()),
        "forgeries": max(figure["forgeries"] for figure in figures.values()),
        "forged": sum(len(figure["forged"]) for figure in figures.values()),
    }


def _counted(families: list[dict[str, Any]], all_of: str, some: str) -> dict[str, Any]:
    """How many there are, and the names of those that were not contained."""
    names = [
        f"{found['family']}: {result['name']} ({result['status']} {result['said'][:80]})"
        for found in families
        for result in found["results"]
        if not result["contained"]
    ]
    return {all_of: sum(len(found["results"]) for found in families), some: names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", action="append", default=[], help="of cgroup, bwrap, landlock")
    print(json.dumps(main(parser.parse_args().tier)))
