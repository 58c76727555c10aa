"""Prompts that leave no room for a turn, or are no text of the tokenizer's, are named by line."""

from __future__ import annotations

import json
from pathlib import Path

from meshrl.job.checks.machine.rows import prompts
from tests.unit.meshrl.job.machine.conftest import read


def write(place: Path, name: str, *rows: object) -> None:
    (place.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_with_room_for_a_turn_are_taken(place: Path) -> None:
    write(place, "train.jsonl", {"prompt": "1" * 63}, {"prompt": "2"})
    prompts.lengths(read(place))
    place.write_text(place.read_text().replace("[algorithm]\ngroup_size = 4\n", ""))
    write(place, "train.jsonl", {"prompt": "1" * 40, "response": "1" * 24})
    prompts.lengths(read(place, "algorithm.name=sft", "reward.use="))


def test_rows_of_an_environment_of_the_authors_own_are_its_business(place: Path) -> None:
    write(place, "train.jsonl", {"prompt": "1" * 100})
    (place.parent / "rooms.py").write_text("def room(): ...\n")
    prompts.lengths(read(place, "environment.use=rooms:room"))
