"""`meshrl chat`: the model of a run in its job's environment, by a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from meshrl.directory.target import run_of
from meshrl.run.outcome import INTERRUPTED
from meshrl.run.talking.model_of import model_of


def chat(
    chosen: Path,
    step: int | None,
    best: bool,
    prompt: str | None,
    row: int | None,
    temperature: float,
    seed: int | None,
    as_json: bool,
) -> int:
    """The exit status; the process says itself what the model said, or what is wrong."""
    run = run_of(chosen, None)
    with tempfile.TemporaryDirectory(prefix="meshrl-chat-") as made:
        scratch = Path(made)
        model = model_of(run, step, best, scratch)
        words = [sys.executable, "-m", "services.rollout.talking", "--run", str(run.directory)]
        words += ["--model", str(model), "--scratch", str(scratch)]
        words += ["--temperature", str(temperature), *(["--json"] if as_json else [])]
        for name, value in (("--prompt", prompt), ("--row", row), ("--seed", seed)):
            words += [f"{name}={value}"] if value is not None else []
        try:
            return subprocess.run(words, check=False).returncode
        except KeyboardInterrupt:  # the process has heard it too
            return INTERRUPTED
