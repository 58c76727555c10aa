"""`meshrl export`: a version of a run as a Hugging Face directory, by a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.directory import places


def command(run_dir: Path, out: Path, step: int | None = None, best: bool = False) -> list[str]:
    """What writes it."""
    words = [sys.executable, "-m", "meshrl.services.weights.export", "--run", str(run_dir)]
    words += ["--out", str(out)]
    words += ["--step", str(step)] if step is not None else []
    return words + (["--best"] if best else [])


def refuse_two(step: int | None, best: bool) -> None:
    """Raise ConfigError if a step and the best version are wanted."""
    if best and step is not None:
        raise ConfigError("--step and --best mean two versions", fix="give one of them")


def complaint(printed: str) -> str:
    """Return why nothing was written, of what the process has printed."""
    lines = printed.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "nothing was written"


def export(
    run: Path, step: int | None, best: bool, out: Path | None, *, quiet: bool = False
) -> int:
    """The exit status; the process says itself what it wrote, unless `quiet`, or what is wrong."""
    refuse_two(step, best)
    run_dir = places.existing_run(run)
    suffix = f"-{step}" if step is not None else "-best" if best else ""
    target = (out or run_dir / f"model{suffix}").absolute()
    said = subprocess.DEVNULL if quiet else None
    written = subprocess.run(command(run_dir, target, step, best), check=False, stdout=said)
    return written.returncode
