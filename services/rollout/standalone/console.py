"""Common parts of this folder's programs: their arguments, the job of a run, trajectories as
terminal lines, and exit statuses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.base.host.terminal import (
    escape_controls,
    escaped_output,
    print_traceback,
    unwrap_stream,
)
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.standalone.local_player import PlayedTrajectory

EXIT_INTERRUPTED = 130
INPUT_TIMEOUT_S = 7 * 86_400.0  # time limit for a user's input
ROLE_COLORS = {
    "prompt": "2",
    "environment": "2",
    "tool": "36",
    "model": "1",
}  # colors of the terminal


class ChatConsole:
    """Console: it prints turns as lines on standard output and reads the user's input. `quiet`: no
    turns.
    """

    def __init__(self, host: SystemHost, quiet: bool) -> None:
        self._host, self._quiet = host, quiet
        self._colored = sys.stdout.isatty()

    def show_turn(self, turn: dict[str, Any]) -> None:
        role, text = str(turn["role"]), str(turn["text"])
        if self._quiet or (role == "environment" and not text):
            return
        if role == "tool":
            text = f"{turn['name']}({json.dumps(turn['input'], ensure_ascii=False)}) -> {text}"
        if turn.get("truncated"):
            text += " [truncated: the limit is reached]"
        label, out = f"{role + ':':<13}", unwrap_stream(sys.stdout)
        text = escape_controls(text)
        if self._colored:
            text = f"\033[{ROLE_COLORS.get(role, '0')}m{text}\033[0m"
        print(f"{label}{text}", file=out, flush=True)

    async def read_line(self, prompt: str) -> str | None:
        """Read a non-empty line; return None at the end of the input."""
        try:
            line = await self._host.run_blocking(input, prompt, deadline_s=INPUT_TIMEOUT_S)
        except EOFError:
            return None
        return line.strip() or await self.read_line(prompt)

    def print_result(self, played: PlayedTrajectory, as_json: bool) -> None:
        if as_json:
            document = {
                "prompt": played.prompt,
                "turns": played.turns,
                "reason": played.reason,
                "score": played.score,
                "metrics": played.metrics,
            }
            print(json.dumps(document, ensure_ascii=False), flush=True)
        elif played.score is not None:
            print(f"{'reward:':<13}{played.score:g}", flush=True)
            for name, value in played.metrics.items():
                print(f"{f'  {name}:':<13}{value:g}", flush=True)


def create_base_parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--run", type=Path, required=True, help="run directory of the job")
    found.add_argument(
        "--model", type=Path, required=True, help="directory of the model in Hugging Face format"
    )
    found.add_argument("--scratch", type=Path, required=True, help="directory for logs")
    found.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature; 0: greedy"
    )
    found.add_argument("--seed", type=int)
    found.add_argument("--json", action="store_true", help="print one trajectory per line")
    return found


def load_job(run: Path, action: str) -> JobData:
    """Load the job of a run. Raise ConfigError if its environment does not support `action`."""
    document = json.loads((run / "job.json").read_text(encoding="utf-8"))
    job = JobData.from_document(document["job"], document["document"], str(run))
    if job.config.environment.verifiers:
        raise ConfigError(
            f"an environment of verifiers cannot be {action}", fix="Use `meshrl eval`"
        )
    return job


def choose_seed(args: argparse.Namespace) -> int:
    """Choose the seed of the first trajectory: the given one, or a random one."""
    return args.seed if args.seed is not None else int(Random.from_os_entropy().hex_token(7), 16)


def run_program(main: Coroutine[Any, Any, int | None]) -> None:
    """Run a program; exit with its return value, or with a status for its error."""
    sys.excepthook = print_traceback
    try:
        with escaped_output():
            sys.exit(asyncio.run(main))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except MeshError as error:
        sys.exit(escape_controls(f"error: {error}"))
