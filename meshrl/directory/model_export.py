"""`meshrl export`: writes a run's version as a Hugging Face directory, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.directory import directory_paths


def build_export_command(
    run_dir: Path, output_directory: Path, step: int | None = None, best_version: bool = False
) -> list[str]:
    """Return the command of the export process."""
    words = [sys.executable, "-m", "meshrl.services.weights.export", "--run", str(run_dir)]
    words += ["--out", str(output_directory)]
    words += ["--step", str(step)] if step is not None else []
    return words + (["--best"] if best_version else [])


def require_one_version(step: int | None, best_version: bool) -> None:
    """Raise ConfigError if a step and the best version are wanted."""
    if best_version and step is not None:
        raise ConfigError("--step and --best select two versions", fix="Pass only one of them")


def extract_error(output: str) -> str:
    """Return why nothing was written, of what the process has printed."""
    lines = output.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "the export wrote no model and no error"


def export_model(
    run: Path,
    step: int | None,
    best_version: bool,
    output_directory: Path | None,
    *,
    quiet: bool = False,
) -> int:
    """Export a version and return the exit status.

    The process prints its output path, unless `quiet`, and its errors.
    """
    require_one_version(step, best_version)
    run_dir = directory_paths.require_run(run)
    suffix = f"-{step}" if step is not None else "-best" if best_version else ""
    target = (output_directory or run_dir / f"model{suffix}").absolute()
    output = subprocess.DEVNULL if quiet else None
    written = subprocess.run(
        build_export_command(run_dir, target, step, best_version), check=False, stdout=output
    )
    return written.returncode
