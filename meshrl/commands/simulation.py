"""`meshrl simulate`: a scenario on a simulated cluster, in a process of its own."""

from __future__ import annotations

import difflib
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from meshrl.common.base.errors import ConfigError, NotFound

SCENARIOS = Path(__file__).parents[1] / "sim/cluster/scenarios"
# Scenarios without a cluster: module, options and description.
OTHER_SCENARIOS = {
    "validity": (
        ["loadtests.simulator", "--arms=broad,real"],
        "The simulator, compared with a virtual mesh of 64 gangs and a real mesh",
    ),
    "cake": (
        ["meshrl.sim.prefixes"],
        "A long prefix, computed from its front while it is loaded from its back",
    ),
    "zebra": (
        ["meshrl.sim.zebra"],
        "Attention on new accelerators and experts on old ones, with the setups of HeterMoE",
    ),
}


def run_simulation(
    scenario: str,
    what_if: Sequence[str],
    overrides: Sequence[str],
    out: Path | None = None,
    run_dir: Path | None = None,
) -> int:
    """Run a scenario and return the exit status; without a scenario and a run, list scenarios."""
    if scenario in OTHER_SCENARIOS:
        words, _ = OTHER_SCENARIOS[scenario]
        problem = ""
        if any((what_if, overrides, out, run_dir)):
            problem = f"takes no options; see python -m {words[0]} --help"
        elif importlib.util.find_spec("loadtests") is None and words[0].startswith("loadtests."):
            problem = f"needs a checkout of MeshRL; run python -m {words[0]} there"
        if problem:
            print(f"{scenario} {problem}", file=sys.stderr)
            return 2
        return subprocess.run([sys.executable, "-m", *words], check=False).returncode
    if scenario:
        _reject_other_arguments(scenario)
    words = [sys.executable, "-m", "meshrl.sim.cluster", *([scenario] if scenario else [])]
    words += [f"--from={run_dir}"] if run_dir is not None else []
    words += [f"--what-if={one}" for one in what_if] + [f"--set={one}" for one in overrides]
    words += [f"--out={out}"] if out is not None else []
    status = subprocess.run(words, check=False).returncode
    if not scenario and run_dir is None:
        for name, (_, about) in OTHER_SCENARIOS.items():
            print(f"{name:12} {about}")
    return status


def _reject_other_arguments(scenario: str) -> None:
    """Raise NotFound or ConfigError for a run, a job or an unknown name, with what to type."""
    path = Path(scenario)
    if (path / "job.json").is_file():
        raise ConfigError(f"{path} is a run", fix=f"Type: meshrl simulate --from {path}")
    if path.is_file() and "reward" in _read_keys(path):
        fix = "Run it, then type: meshrl simulate --from RUN"
        raise ConfigError(f"{path} is a job, not a scenario", fix=fix)
    names = sorted([*(file.stem for file in SCENARIOS.glob("*.toml")), *OTHER_SCENARIOS])
    if not path.suffix and not path.exists() and scenario not in names:
        close = difflib.get_close_matches(scenario, names, 1)
        meant = f"Did you mean {close[0]}? " if close else ""
        fix = f"{meant}There are {', '.join(names)}; or pass a TOML file"
        raise NotFound(f"there is no scenario {scenario}", fix=fix)


def _read_keys(path: Path) -> list[str]:
    """Return the top-level keys of a TOML file; none of another file."""
    try:
        return list(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
