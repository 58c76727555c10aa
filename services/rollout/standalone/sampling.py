"""`python -m meshrl.services.rollout.standalone.sampling`: trajectories of prompts and rows from
standard input.

They use the job's environment, and have rewards and tokens. The program is not interactive. An
input line is `{"prompt": TEXT}` or `{"row": {...}}`, a complete row.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshrl.common.base.errors import ToolFailed
from meshrl.common.grading.row_values import find_value
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.standalone.console import (
    ChatConsole,
    choose_seed,
    create_base_parser,
    load_job,
    run_program,
)
from meshrl.services.rollout.standalone.local_player import LocalPlayer, PlayedTrajectory


@dataclass(frozen=True)
class PromptRequest:
    """Row of the trajectories. `is_complete`: the row is one of the job's or was given as a row, so
    a failing reward is an error. A bare prompt may have no reward.
    """

    row: dict[str, Any]
    is_complete: bool


@dataclass
class SampleResult:
    trajectory: PlayedTrajectory | None = None  # None: it failed
    error: str = ""  # reason of its failure, or of its reward's
    note: str = ""  # reason of a missing reward that is no error


def parse_prompt(line: str, job: JobData) -> PromptRequest:
    """Parse an input line. A prompt of the job's rows selects that row."""
    document = json.loads(line)
    if "row" in document:
        return PromptRequest(document["row"], True)
    prompt, key = str(document["prompt"]), job.config.dataset.prompt
    for which in ("held_out", "train"):
        for row in job.read_rows(which):
            if find_value(row, key) == prompt:
                return PromptRequest(row, True)
    return PromptRequest({key: prompt}, False)


async def sample(
    player: LocalPlayer,
    key: int,
    request: PromptRequest,
    args: argparse.Namespace,
    seed: int,
    console: ChatConsole,
) -> SampleResult:
    """Sample one trajectory; return errors of the job's own code in the result. Raise Refused if
    the prompt is too long.
    """
    found = SampleResult()
    try:
        temperature, most_new = args.temperature, args.max_tokens
        played = await player.play(
            key, request.row, temperature, seed, console.show_turn, max_new_tokens=most_new
        )
    except ToolFailed as error:
        is_incomplete = "KeyError" in error.message and not request.is_complete
        found.error = describe_no_row("environment", error) if is_incomplete else str(error)
        return found
    found.trajectory = played
    if not player.job.config.reward.reward_parts:
        return found
    try:
        played.score, played.metrics = await player.compute_reward(request.row, played.turns)
    except ToolFailed as error:
        if request.is_complete:
            found.error = str(error)
        else:
            found.note = f"none: {describe_no_row('reward', error)}"
    return found


def describe_no_row(what: str, error: ToolFailed) -> str:
    """Return why a prompt that no row has cannot be used, from the error of the job's code."""
    missing = re.search(r"KeyError: (.*)", error.message)  # with its place
    why = f"needs the row's key {missing[1]}" if missing else f"failed ({error.message})"
    whole = 'Pass a whole row as JSON, such as \'{"prompt": "...", ...}\''
    return f"no row of the job's datasets has this prompt, and the {what} {why}. {whole}"


def build_document(
    request: PromptRequest, result: SampleResult, temperature: float, seed: int
) -> dict[str, Any]:
    """Build the line of `meshrl sample --json`; its keys are those of `samples.jsonl`."""
    played = result.trajectory
    return {
        "row": request.row,
        "prompt": played.prompt if played else None,
        "turns": played.turns if played else [],
        "reward": played.score if played else None,
        "metrics": played.metrics if played else {},
        "ending": played.reason if played else "failed",
        "error": result.error,
        "tokens": played.tokens if played else 0,
        "sampled": played.sampled_tokens if played else 0,
        "temperature": temperature,
        "seed": seed,
    }


def format_result(result: SampleResult) -> Iterable[str]:
    played = result.trajectory
    if played is not None:
        reward = f"{played.score:g}" if played.score is not None else result.note
        if reward and not result.error:
            yield f"{'reward:':<13}{reward}"
            for name, value in played.metrics.items():
                yield f"{f'  {name}:':<13}{value:g}"
        yield (
            f"{'tokens:':<13}{played.tokens}, {played.sampled_tokens} sampled, ended: "
            f"{played.reason}"
        )
    if result.error:
        yield f"{'failed:':<13}{result.error}"


async def main(args: argparse.Namespace) -> int:
    """Run the program; return the exit status, 1 if a trajectory or its reward failed."""
    host = SystemHost()
    job = load_job(args.run, "sampled from")
    requests = [parse_prompt(line, job) for line in sys.stdin if line.strip()]
    partner = LocalPlayer(host, job, args.model, args.scratch, is_conversation=False)
    console = ChatConsole(host, quiet=args.json)
    begin = choose_seed(args)
    failed = False
    try:
        for key, one in enumerate(one for one in requests for _ in range(args.n)):
            if key and not args.json:
                print()
            found = await sample(partner, key, one, args, begin + key, console)
            failed = failed or bool(found.error)
            if args.json:
                line = build_document(one, found, args.temperature, begin + key)
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print("\n".join(format_result(found)), flush=True)
    finally:
        await partner.close()
    return int(failed)


def create_parser() -> argparse.ArgumentParser:
    found = create_base_parser(__doc__)
    found.add_argument("--n", type=int, default=1, help="trajectories of each prompt")
    found.add_argument(
        "--max-tokens", type=int, help="maximum of tokens sampled for each trajectory"
    )
    return found


if __name__ == "__main__":
    run_program(main(create_parser().parse_args()))
