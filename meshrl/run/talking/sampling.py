"""`meshrl sample`: trajectories of prompts or rows with a run's model, by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from meshrl.directory.target import run_of
from meshrl.run.outcome import INTERRUPTED
from meshrl.run.talking.model_of import model_of

STDIN = "-"


@dataclass(frozen=True)
class Choice:
    """With which version, and how, trajectories are sampled."""

    step: int | None = None
    best: bool = False
    n: int = 1  # of each prompt
    temperature: float = 1.0  # 0: greedy
    max_tokens: int | None = None  # that the model samples of a trajectory; None: what has room
    seed: int | None = None  # None: another each time


def sample(chosen: Path, prompt: str, choice: Choice, as_json: bool) -> int:
    """The exit status: 1 when a trajectory failed, which the process says itself."""
    run = run_of(chosen, None)
    lines = list(asked(sys.stdin if prompt == STDIN else [prompt]))
    if not lines:
        raise ConfigError("there is no prompt", fix="Give one, or lines on standard input")
    with tempfile.TemporaryDirectory(prefix="meshrl-sample-") as made:
        scratch = Path(made)
        model = model_of(run, choice.step, choice.best, scratch)
        words = [sys.executable, "-m", "services.rollout.talking.sampling"]
        words += ["--run", str(run.directory), "--model", str(model), "--scratch", str(scratch)]
        words += [f"--n={choice.n}", f"--temperature={choice.temperature}"]
        for name, value in (("--max-tokens", choice.max_tokens), ("--seed", choice.seed)):
            words += [f"{name}={value}"] if value is not None else []
        words += ["--json"] if as_json else []
        try:
            return subprocess.run(words, check=False, input="".join(lines), text=True).returncode
        except KeyboardInterrupt:  # the process has heard it too
            return INTERRUPTED


def asked(texts: Iterable[str]) -> Iterator[str]:
    """The lines that the process reads: of each text a prompt, or a whole row of a JSON object."""
    for text in texts:
        text = text.rstrip("\r\n")
        if text.strip():
            row = _row(text)
            yield json.dumps({"prompt": text} if row is None else {"row": row}) + "\n"


def _row(text: str) -> dict[str, object] | None:
    """The JSON object that a text is; None: it is a prompt."""
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
