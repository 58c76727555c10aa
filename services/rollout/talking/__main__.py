"""`python -m meshrl.services.rollout.talking`: a person at a terminal, and a model with its
tools."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from meshrl.common.base.errors import MeshError, NotFound, ToolFailed
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.talking.console import ChatConsole, job_of, parser_of, run, seed_of
from meshrl.services.rollout.talking.partner import Partner


async def main(a: argparse.Namespace) -> None:
    host = SystemHost()
    job = job_of(a.run, "talked with")
    config = job.config
    converse = bool(config.environment.chat and not config.environment.use and a.row is None)
    partner = Partner(host, job, a.model, a.scratch, converse=converse)
    console = ChatConsole(host, quiet=a.json)
    seed = seed_of(a)
    held_out = job.rows("held_out") or job.rows("train")
    try:
        if a.prompt is not None or a.row is not None:
            await _play(partner, console, a, 0, row_of(config, held_out, a.row, a.prompt), seed)
        elif converse:
            await _converse(partner, console, a, seed)
        else:
            await _rows(partner, console, a, held_out, seed)
    finally:
        await partner.close()


async def _play(
    partner: Partner, console: ChatConsole, a: argparse.Namespace, key: int, row: Any, seed: int
) -> None:
    whole = a.row is not None or key > 0
    try:
        played = await partner.play(
            key, row, a.temperature, seed + key, console.show, reward=whole and a.prompt is None
        )
    except ToolFailed as error:
        if "KeyError" in error.message and a.row is None:
            error.fix = "It needs more of a row than the prompt: --row N plays a whole one"
        raise
    console.tell(played, a.json)


async def _converse(
    partner: Partner, console: ChatConsole, a: argparse.Namespace, seed: int
) -> None:
    first = await console.hear("you:         ")
    if first is None:
        return

    async def hear() -> str | None:
        return await console.hear("you:         ")

    row = {"prompt": first}
    played = await partner.play(0, row, a.temperature, seed, console.show, hear)
    if played.reason == "length":
        print(f"the conversation is full: {partner.most} tokens")


async def _rows(
    partner: Partner,
    console: ChatConsole,
    a: argparse.Namespace,
    held_out: list[dict[str, Any]],
    seed: int,
) -> None:
    config, key = partner.job.config, 0
    while (said := await console.hear("row number, or a prompt: ")) is not None:
        key += 1
        number = int(said) if said.isdecimal() else None
        try:
            row = row_of(config, held_out, number, None if number is not None else said)
            await _play(partner, console, a, key, row, seed)
        except MeshError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)


def row_of(
    config: Any, rows: list[dict[str, Any]], number: int | None, prompt: str | None
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if number is not None:
        if not 0 <= number < len(rows):
            raise NotFound(f"there is no row {number}", fix=f"Rows go from 0 to {len(rows) - 1}")
        row = rows[number]
    return row if prompt is None else {**row, config.dataset.prompt: prompt}


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    found.add_argument("--prompt", help="one trajectory of this prompt")
    found.add_argument("--row", type=int, help="one trajectory of a held-out row, from 0")
    return found


if __name__ == "__main__":
    run(main(parser().parse_args()))
