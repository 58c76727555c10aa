"""What the programs of this folder share: their arguments, the job of a run, and how they end."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError, MeshError
from common.base.host.terminal import guarded_output, print_traceback, visible
from common.base.random import Random
from common.job.bundle.job_data import JobData

INTERRUPTED = 130


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that all programs take."""
    found = argparse.ArgumentParser(description=about)
    found.add_argument("--run", type=Path, required=True, help="the run, whose job it is")
    found.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    found.add_argument("--scratch", type=Path, required=True, help="for logs")
    found.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    found.add_argument("--seed", type=int)
    found.add_argument("--json", action="store_true", help="a trajectory a line")
    return found


def job_of(run: Path, done: str) -> JobData:
    """The job of a run. ConfigError where its environment is one that nothing can be `done`."""
    document = json.loads((run / "job.json").read_text(encoding="utf-8"))
    job = JobData.of(document["job"], document["document"], str(run))
    if job.config.environment.verifiers:
        raise ConfigError(
            f"a verifiers environment cannot be {done}", fix="`meshrl eval` evaluates it"
        )
    return job


def seed_of(a: argparse.Namespace) -> int:
    """The seed of the first trajectory: a random one if none was given."""
    return a.seed if a.seed is not None else int(Random.system().token(7), 16)


def run(main: Coroutine[Any, Any, int | None]) -> None:
    """Runs a program; its exit status is what it returns, or tells how it ended."""
    sys.excepthook = print_traceback
    try:
        with guarded_output():
            sys.exit(asyncio.run(main))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except MeshError as error:
        sys.exit(visible(f"error: {error}"))
