"""`meshrl chat` and `meshrl sample`: trajectories of a run's model, in a process and without a
mesh.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.directory import model_export
from meshrl.directory.command_target import RunLocation, may_be_running, resolve_run
from meshrl.runs.outcome import EXIT_INTERRUPTED

STDIN_ARGUMENT = "-"
CHAT_MODULE, SAMPLE_MODULE = (
    "meshrl.services.rollout.standalone",
    "meshrl.services.rollout.standalone.sampling",
)


@dataclass(frozen=True)
class ModelChoice:
    """Version and settings with which trajectories are sampled."""

    step: int | None = None
    best: bool = False
    temperature: float = 1.0  # 0: greedy
    seed: int | None = None  # None: another each time
    as_json: bool = False


def chat_with_model(target: Path, choice: ModelChoice, prompt: str | None, row: int | None) -> int:
    """Chat with the model and return the exit status; the process prints output and errors."""
    options = {"--prompt": prompt, "--row": row}
    return _run_sampler(resolve_run(target, None), CHAT_MODULE, choice, options)


def sample_model(
    target: Path, prompt: str, choice: ModelChoice, n: int = 1, max_tokens: int | None = None
) -> int:
    """Sample from the model and return the exit status: 1 when a trajectory failed.

    The process prints the failures itself. `n` trajectories are sampled of each prompt, each of at
    most `max_tokens` of the model's; None: as many as fit.
    """
    run = resolve_run(target, None)
    lines = list(encode_requests(sys.stdin if prompt == STDIN_ARGUMENT else [prompt]))
    if not lines:
        raise ConfigError("the prompt is missing", fix="Pass a prompt, or lines on standard input")
    options = {"--n": n, "--max-tokens": max_tokens}
    return _run_sampler(run, SAMPLE_MODULE, choice, options, "".join(lines))


def _run_sampler(
    run: RunLocation,
    module: str,
    choice: ModelChoice,
    options: Mapping[str, str | int | None],
    lines: str | None = None,
) -> int:
    """Return the exit status of the sampling process; `lines` are its standard input."""
    with tempfile.TemporaryDirectory(prefix="meshrl-talking-") as scratch_dir:
        scratch = Path(scratch_dir)
        model = find_model(run, choice.step, choice.best, scratch)
        words: Sequence[str | Path] = [sys.executable, "-m", module, "--run", run.directory]
        words = [*words, "--model", model, "--scratch", scratch]
        options = {**options, "--temperature": str(choice.temperature), "--seed": choice.seed}
        words += [f"{name}={value}" for name, value in options.items() if value is not None]
        words += ["--json"] if choice.as_json else []
        try:
            return subprocess.run(words, check=False, input=lines, text=True).returncode
        except KeyboardInterrupt:  # the process has received it too
            return EXIT_INTERRUPTED


def find_model(run: RunLocation, step: int | None, best: bool, scratch: Path) -> Path:
    """Return the directory of a step's version, the best one or the newest.

    It is the run's own directory if that is the newest, else one written below `scratch`. Raises
    NotFound when there is no such version.
    """
    model_export.require_one_version(step, best)
    if not (run.directory / "job.json").is_file():
        raise NotFound(
            f"the run of {run.job} is in {run.directory}, which does not exist on this host",
            fix="Run the command on the host of the run, or fetch the model with `meshrl export`",
        )
    own = run.directory / "model"
    last = step is None and not best
    if last and (own / "config.json").is_file() and not may_be_running(run.mesh_paths):
        return own
    out = scratch / "model"
    words = model_export.build_export_command(run.directory, out, step, best)
    written = subprocess.run(words, check=False, capture_output=True, text=True)
    if written.returncode == 0:
        return out
    why = model_export.extract_error(written.stderr)
    if not last:
        raise NotFound(why)
    raise NotFound(
        f"{run.display_path} has no model yet: {why.partition('. ')[0]}",
        fix="Wait for its first version; `meshrl status` shows the progress",
    )


def encode_requests(texts: Iterable[str]) -> Iterator[str]:
    """Yield input lines of the process: of each text a prompt, or a whole row of a JSON object."""
    for text in texts:
        text = text.rstrip("\r\n")
        if not text.strip():
            continue
        row = None
        if text.lstrip().startswith("{"):
            with contextlib.suppress(ValueError):  # it is a prompt
                row = json.loads(text)
        yield json.dumps({"row": row} if isinstance(row, dict) else {"prompt": text}) + "\n"
