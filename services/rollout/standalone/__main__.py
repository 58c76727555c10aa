"""`python -m meshrl.services.rollout.standalone`: a chat between a user at a terminal and a model
with its tools.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from meshrl.common.base.errors import MeshError, NotFound, ToolFailed
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.standalone.console import (
    ChatConsole,
    choose_seed,
    create_base_parser,
    load_job,
    run_program,
)
from meshrl.services.rollout.standalone.local_player import LocalPlayer


async def main(args: argparse.Namespace) -> None:
    host = SystemHost()
    job = load_job(args.run, "talked with")
    config = job.config
    converse = bool(config.environment.chat and not config.environment.use and args.row is None)
    partner = LocalPlayer(host, job, args.model, args.scratch, is_conversation=converse)
    console = ChatConsole(host, quiet=args.json)
    seed = choose_seed(args)
    held_out = job.read_rows("held_out") or job.read_rows("train")
    try:
        if args.prompt is not None or args.row is not None:
            await _play(
                partner, console, args, 0, choose_row(config, held_out, args.row, args.prompt), seed
            )
        elif converse:
            await _converse(partner, console, args, seed)
        else:
            await _play_rows(partner, console, args, held_out, seed)
    finally:
        await partner.close()


async def _play(
    player: LocalPlayer,
    console: ChatConsole,
    args: argparse.Namespace,
    key: int,
    row: Any,
    seed: int,
) -> None:
    has_whole_row = args.row is not None or key > 0
    try:
        played = await player.play(
            key,
            row,
            args.temperature,
            seed + key,
            console.show_turn,
            with_reward=has_whole_row and args.prompt is None,
        )
    except ToolFailed as error:
        if "KeyError" in error.message and args.row is None:
            error.fix = (
                "Play a whole row with --row N: the environment needs more keys than the prompt"
            )
        raise
    console.print_result(played, args.json)


async def _converse(
    player: LocalPlayer, console: ChatConsole, args: argparse.Namespace, seed: int
) -> None:
    first = await console.read_line("you:         ")
    if first is None:
        return

    async def hear() -> str | None:
        return await console.read_line("you:         ")

    row = {"prompt": first}
    played = await player.play(0, row, args.temperature, seed, console.show_turn, hear)
    if played.reason == "length":
        print(f"the conversation is full: {player.max_length} tokens")


async def _play_rows(
    player: LocalPlayer,
    console: ChatConsole,
    args: argparse.Namespace,
    held_out: list[dict[str, Any]],
    seed: int,
) -> None:
    config, key = player.job.config, 0
    while (line := await console.read_line("row number, or a prompt: ")) is not None:
        key += 1
        number = int(line) if line.isdecimal() else None
        try:
            row = choose_row(config, held_out, number, None if number is not None else line)
            await _play(player, console, args, key, row, seed)
        except MeshError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)


def choose_row(
    config: Any, rows: list[dict[str, Any]], number: int | None, prompt: str | None
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if number is not None:
        if not 0 <= number < len(rows):
            raise NotFound(
                f"there is no row {number}", fix=f"Choose a row from 0 to {len(rows) - 1}"
            )
        row = rows[number]
    return row if prompt is None else {**row, config.dataset.prompt: prompt}


def create_parser() -> argparse.ArgumentParser:
    found = create_base_parser(__doc__)
    found.add_argument("--prompt", help="sample one trajectory of this prompt")
    found.add_argument(
        "--row", type=int, help="sample one trajectory of this held-out row, counted from 0"
    )
    return found


if __name__ == "__main__":
    run_program(main(create_parser().parse_args()))
