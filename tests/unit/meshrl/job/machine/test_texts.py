"""Checks of a job's texts: prompts, rows and their tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from meshrl.job import job_reader
from meshrl.job.checks.host import module_imports, tokens
from meshrl.job.checks.host.rows import prompt_lengths, tokenized_texts
from tests.unit.meshrl.conftest import SHAPE
from tests.unit.meshrl.job.machine.conftest import get_error, read

ROOM = """\
class Room:
    def open(self, row):
        return "1+" + row["prompt"]

    def step(self, text):
        return {"done": True}

def room():
    return Room()
"""


@pytest.fixture
def rows(place: Path) -> Path:
    """Make a job whose tokenizer has an unknown token and a special one."""
    backend = Backend(models.WordLevel({c: i for i, c in enumerate("?0123=+")}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.add_special_tokens([AddedToken("<e>", special=True, normalized=False)])
    backend.save(str(place.parent / "tokenizer.json"))
    return place


def write(place: Path, *rows: object) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (place.parent / "train.jsonl").write_text(text)


def test_replaced_characters_are_named_by_row(rows: Path) -> None:
    write(rows, {"prompt": "1+1=?"}, *({"prompt": f"1+{n}=x好"} for n in range(5)))
    error = get_error(tokenized_texts.check_texts, rows)
    assert "drops or replaces characters: " in error and "train.jsonl, line 2: " in error
    assert "'好'" in error and "'x'" in error and "and 2 more rows" in error
    write(rows, {"prompt": "1+1=?"})
    tokenized_texts.check_texts(read(rows))


def test_special_tokens_without_a_chat_need_a_setting(rows: Path) -> None:
    write(rows, {"prompt": "1+1="}, {"prompt": "1<e>"})
    error = get_error(tokenized_texts.check_texts, rows)
    assert "train.jsonl, line 2: '<e>'" in error and "environment.special_tokens" in error
    for choice in ("anywhere", "template"):
        tokenized_texts.check_texts(read(rows, f"environment.special_tokens={choice}"))


def test_response_may_end_with_a_stop_token(rows: Path) -> None:
    rows.write_text(rows.read_text().replace("[algorithm]\ngroup_size = 4\n", ""))
    settings = ["algorithm.name=sft", "reward.use=", 'rollout.stop=["<e>"]']
    write(rows, {"prompt": "1+1=", "response": "2<e>"})
    tokenized_texts.check_texts(read(rows, *settings))
    write(rows, {"prompt": "1+1=", "response": "2<e>2<e>"})
    assert "line 1: '<e>'" in get_error(tokenized_texts.check_texts, rows, *settings)


def test_prompts_of_a_custom_environment_are_sampled(rows: Path) -> None:
    (rows.parent / "rooms.py").write_text(ROOM)
    write(rows, *({"prompt": "1="} for _ in range(9)), {"prompt": "x="})
    error = get_error(module_imports.check_imports, rows, "environment.use=rooms:room")
    assert "train.jsonl, line 10: 'x'" in error
    write(rows, *({"prompt": "1="} for _ in range(9)), {"prompt": 5})
    error = get_error(module_imports.check_imports, rows, "environment.use=rooms:room")
    assert "TypeError" in error and "train.jsonl, line 10" in error and "rooms.py, line 3" in error


def write_rows(place: Path, name: str, *rows: object) -> None:
    (place.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_that_leave_space_for_a_turn_are_accepted(place: Path) -> None:
    write_rows(place, "train.jsonl", {"prompt": "1" * 63}, {"prompt": "2"})
    prompt_lengths.check_prompt_lengths(read(place))
    place.write_text(place.read_text().replace("[algorithm]\ngroup_size = 4\n", ""))
    write_rows(place, "train.jsonl", {"prompt": "1" * 40, "response": "1" * 24})
    prompt_lengths.check_prompt_lengths(read(place, "algorithm.name=sft", "reward.use="))


def test_prompt_lengths_of_a_custom_environment_are_not_checked(place: Path) -> None:
    write_rows(place, "train.jsonl", {"prompt": "1" * 100})
    (place.parent / "rooms.py").write_text("def room(): ...\n")
    prompt_lengths.check_prompt_lengths(read(place, "environment.use=rooms:room"))


def write_frozen_model(directory: Path, positions: int) -> None:
    directory.mkdir()
    described = SHAPE | {"max_position_embeddings": positions}
    (directory / "config.json").write_text(json.dumps(described))


def test_trajectories_longer_than_the_models_positions_are_rejected(place: Path) -> None:
    positions = "model.config.max_position_embeddings=256"
    tokens.check_positions(read(place, positions, "rollout.max_tokens=256"))
    with pytest.raises(
        Exception, match=r"max_tokens = 320 \(the default\) exceeds .* 256 pos"
    ) as e:
        tokens.check_positions(job_reader.read_job_file(place, [positions]))
    assert "Set rollout.max_tokens to 256 or less" in str(e.value)


def test_trajectories_longer_than_a_frozen_models_positions_are_rejected(place: Path) -> None:
    write_frozen_model(place.parent / "teacher", 48)
    teacher = "models.teacher.path=teacher"
    error = get_error(tokens.check_positions, place, teacher)
    assert "models.teacher" in error and "rollout.max_tokens = 64" in error and "48" in error
    error = get_error(tokens.check_positions, place, teacher, "models.teacher.max_tokens=50")
    assert "models.teacher.max_tokens = 50 exceeds" in error
    tokens.check_positions(read(place, teacher, "models.teacher.max_tokens=48"))


def test_added_tokens_count_towards_the_vocabulary_check(place: Path) -> None:
    tokens.check_vocabulary(read(place))
    file = place.parent / "added.json"
    backend = Backend.from_file(str(place.parent / "tokenizer.json"))
    backend.add_tokens([AddedToken(f"<extra {i}>") for i in range(5)])
    backend.save(str(file))
    error = get_error(tokens.check_vocabulary, place, "model.tokenizer=added.json")
    assert "ids up to 16 ('<extra 4>')" in error


def test_single_and_multi_token_stops_are_accepted(place: Path) -> None:
    tokens.check_stop(read(place, 'rollout.stop=["="]', 'rollout.stop_text=["12="]'))
