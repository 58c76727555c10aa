"""The model of a run as a Hugging Face directory, for who plays trajectories with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from common.errors import ConfigError, NotFound
from meshrl.directory import exporting
from meshrl.directory.target import Run, may_live


def model_of(run: Run, step: int | None, best: bool, scratch: Path) -> Path:
    """The directory of a step's version, the best one or the newest: the run's own where that is
    the newest, or else one that is written below `scratch`. NotFound when there is no such version.
    """
    if best and step is not None:
        raise ConfigError("--step and --best mean two versions", fix="give one of them")
    if not (run.directory / "job.json").is_file():
        raise NotFound(
            f"the run of {run.job} is in {run.directory}, which this host does not have",
            fix="Ask on the host that has it, or bring it here by `meshrl export`",
        )
    own = run.directory / "model"
    last = step is None and not best
    if last and (own / "config.json").is_file() and not may_live(run.place):
        return own
    out = scratch / "model"
    words = exporting.command(run.directory, out, step, best)
    written = subprocess.run(words, check=False, capture_output=True, text=True)
    if written.returncode == 0:
        return out
    said = written.stderr.strip().splitlines()
    told = said[-1].removeprefix("error: ") if said else "nothing was written"
    if not last:
        raise NotFound(told)
    raise NotFound(
        f"there is no model of {run.shown} yet: {told.partition('. ')[0]}",
        fix="The first version comes with the warm start's end; `meshrl status` says how far it is",
    )
