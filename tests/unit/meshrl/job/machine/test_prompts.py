"""Prompts that leave no room for a turn, or are no text of the tokenizer's, are named by line."""

from __future__ import annotations

import json
from pathlib import Path

from meshrl.job.checks.machine.rows import prompts
from tests.unit.meshrl.job.machine.conftest import read, refusal


def write(place: Path, name: str, *rows: object) -> None:
    (place.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_without_room_for_a_turn_are_named_by_file_and_line(place: Path) -> None:
    write(place, "train.jsonl", {"prompt": "1" * 63}, {"prompt": "2"})
    prompts.lengths(read(place))
    write(place, "train.jsonl", {"prompt": "2"}, *({"prompt": str(n) + "1" * 63} for n in range(5)))
    said = refusal(prompts.lengths, place)
    assert "job.toml, line 9" in said and "train.jsonl, line 2 (64 tokens)" in said
    assert "rollout.max_tokens = 64" in said and "and 2 more rows" in said


def test_held_out_rows_count_and_rows_of_other_evaluations(place: Path) -> None:
    write(place, "held.jsonl", {"prompt": "3" * 70})
    assert "held.jsonl, line 1 (70 tokens)" in refusal(prompts.lengths, place)
    write(place, "held.jsonl", {"prompt": "3"})
    write(place, "more.jsonl", {"prompt": "4" * 70})
    more = 'evaluation.datasets=[{name = "more", path = "more.jsonl"}]'
    assert "more.jsonl, line 1" in refusal(prompts.lengths, place, more)


def test_text_that_the_vocabulary_cannot_express_is_named(place: Path) -> None:
    write(place, "train.jsonl", {"prompt": "1+1"}, {"prompt": "one"})
    said = refusal(prompts.lengths, place)
    assert "train.jsonl, line 2" in said and "'one' does not encode" in said


def test_given_answers_share_the_room(place: Path) -> None:
    place.write_text(place.read_text().replace("[algorithm]\ngroup_size = 4\n", ""))
    write(place, "train.jsonl", {"prompt": "1" * 40, "response": "1" * 24})
    settings = ["algorithm.name=sft", "reward.use="]
    prompts.lengths(read(place, *settings))
    said = refusal(prompts.lengths, place, *settings, "rollout.max_tokens=63")
    assert "prompt and answer have" in said and "(64 tokens)" in said


def test_rows_of_an_environment_of_the_authors_own_are_its_business(place: Path) -> None:
    write(place, "train.jsonl", {"prompt": "1" * 100})
    (place.parent / "rooms.py").write_text("def room(): ...\n")
    prompts.lengths(read(place, "environment.use=rooms:room"))


def test_an_empty_prompt_is_named_by_its_line(place: Path) -> None:
    write(place, "train.jsonl", {"prompt": "1"}, {"prompt": ""})
    assert "train.jsonl, line 2: the prompt is empty" in refusal(prompts.lengths, place)
