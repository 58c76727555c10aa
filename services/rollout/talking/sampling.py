"""`python -m meshrl.services.rollout.talking.sampling`: trajectories of prompts and rows from
standard input, in the job's environment, with reward and tokens. Nobody is asked anything.

A line of the input is `{"prompt": TEXT}` or `{"row": {...}}`, a whole row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshrl.common.base.errors import ToolFailed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.talking.console import ChatConsole, job_of, parser_of, run, seed_of
from meshrl.services.rollout.talking.partner import Partner, Played


@dataclass(frozen=True)
class SampledPrompt:
    """What trajectories are to be of. `whole`: the row is one of the job's, or was given as one, so
    that a reward which fails on it is an error; of a bare prompt there may be none.
    """

    row: dict[str, Any]
    whole: bool


@dataclass
class Sampled:
    played: Played | None = None  # None: it failed on its way
    error: str = ""  # why it, or its reward, failed
    note: str = ""  # why there is no reward, where that is no error


def prompt_of(line: str, job: JobData) -> SampledPrompt:
    """What a line of the input means. A prompt that rows of the job have is that row."""
    told = json.loads(line)
    if "row" in told:
        return SampledPrompt(told["row"], True)
    prompt, key = str(told["prompt"]), job.config.dataset.prompt
    for which in ("held_out", "train"):
        for row in job.rows(which):
            if row.get(key) == prompt:
                return SampledPrompt(row, True)
    return SampledPrompt({key: prompt}, False)


async def sample(
    partner: Partner,
    key: int,
    asked: SampledPrompt,
    a: argparse.Namespace,
    seed: int,
    console: ChatConsole,
) -> Sampled:
    """One trajectory; what fails in the job's own code is told and not raised. Refused when the
    prompt is too long.
    """
    found = Sampled()
    try:
        temperature, most_new = a.temperature, a.max_tokens
        played = await partner.play(
            key, asked.row, temperature, seed, console.show, most_new=most_new
        )
    except ToolFailed as error:
        if "KeyError" in error.message and not asked.whole:
            error.fix = "It needs more of a row than the prompt: give a whole row, a JSON object"
        found.error = str(error)
        return found
    found.played = played
    if not partner.job.config.reward.declared:
        return found
    try:
        played.score = await partner.reward(asked.row, played.turns)
    except ToolFailed as error:
        if asked.whole:
            found.error = str(error)
        else:
            found.note = f"none: {error.message}. Give a whole row, a JSON object, if it needs one"
    return found


def document(asked: SampledPrompt, found: Sampled, temperature: float, seed: int) -> dict[str, Any]:
    """The line of `meshrl sample --json`; its names are those of `samples.jsonl`."""
    played = found.played
    return {
        "row": asked.row,
        "prompt": played.prompt if played else None,
        "turns": played.turns if played else [],
        "reward": played.score if played else None,
        "ending": played.reason if played else "failed",
        "error": found.error,
        "tokens": played.tokens if played else 0,
        "sampled": played.sampled if played else 0,
        "temperature": temperature,
        "seed": seed,
    }


def told(found: Sampled) -> Iterable[str]:
    played = found.played
    if played is not None:
        reward = f"{played.score:g}" if played.score is not None else found.note
        if reward and not found.error:
            yield f"{'reward:':<13}{reward}"
        yield f"{'tokens:':<13}{played.tokens}, {played.sampled} sampled, ended: {played.reason}"
    if found.error:
        yield f"{'failed:':<13}{found.error}"


async def main(a: argparse.Namespace) -> int:
    """The exit status: 1 when a trajectory or its reward failed."""
    host = SystemHost()
    job = job_of(a.run, "sampled from")
    asked = [prompt_of(line, job) for line in sys.stdin if line.strip()]
    partner = Partner(host, job, a.model, a.scratch, converse=False)
    console = ChatConsole(host, quiet=a.json)
    begin = seed_of(a)
    failed = False
    try:
        for key, one in enumerate(one for one in asked for _ in range(a.n)):
            if key and not a.json:
                print()
            found = await sample(partner, key, one, a, begin + key, console)
            failed = failed or bool(found.error)
            if a.json:
                line = document(one, found, a.temperature, begin + key)
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print("\n".join(told(found)), flush=True)
    finally:
        await partner.close()
    return int(failed)


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    found.add_argument("--n", type=int, default=1, help="trajectories of each")
    found.add_argument("--max-tokens", type=int, help="that the model samples of each at most")
    return found


if __name__ == "__main__":
    run(main(parser().parse_args()))
