"""Texts that the tokenizer would not write as they are keep a job from starting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from meshrl.job.checks.machine import modules
from meshrl.job.checks.machine.rows import texts
from tests.unit.meshrl.job.machine.conftest import read, refusal

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
    """A job whose tokenizer has an unknown token and a special one."""
    backend = Backend(models.WordLevel({c: i for i, c in enumerate("?0123=+")}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.add_special_tokens([AddedToken("<e>", special=True, normalized=False)])
    backend.save(str(place.parent / "tokenizer.json"))
    return place


def write(place: Path, *rows: object) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (place.parent / "train.jsonl").write_text(text)


def test_characters_that_the_tokenizer_replaces_are_named_by_row(rows: Path) -> None:
    write(rows, {"prompt": "1+1=?"}, *({"prompt": f"1+{n}=x好"} for n in range(5)))
    said = refusal(texts.written, rows)
    assert "drops or replaces characters: " in said and "train.jsonl, line 2: " in said
    assert "'好'" in said and "'x'" in said and "and 2 more rows" in said
    write(rows, {"prompt": "1+1=?"})
    texts.written(read(rows))


def test_special_tokens_without_a_chat_take_a_choice(rows: Path) -> None:
    write(rows, {"prompt": "1+1="}, {"prompt": "1<e>"})
    said = refusal(texts.written, rows)
    assert "train.jsonl, line 2: '<e>'" in said and "environment.special_tokens" in said
    for choice in ("anywhere", "template"):
        texts.written(read(rows, f"environment.special_tokens={choice}"))


def test_an_answer_may_end_with_a_token_of_the_job(rows: Path) -> None:
    rows.write_text(rows.read_text().replace("[algorithm]\ngroup_size = 4\n", ""))
    settings = ["algorithm.name=sft", "reward.use=", 'rollout.stop=["<e>"]']
    write(rows, {"prompt": "1+1=", "response": "2<e>"})
    texts.written(read(rows, *settings))
    write(rows, {"prompt": "1+1=", "response": "2<e>2<e>"})
    assert "line 1: '<e>'" in refusal(texts.written, rows, *settings)


def test_prompts_that_an_environment_opens_are_sampled(rows: Path) -> None:
    (rows.parent / "rooms.py").write_text(ROOM)
    write(rows, *({"prompt": "1="} for _ in range(9)), {"prompt": "x="})
    said = refusal(modules.imported, rows, "environment.use=rooms:room")
    assert "train.jsonl, line 10: 'x'" in said
    write(rows, *({"prompt": "1="} for _ in range(9)), {"prompt": 5})
    said = refusal(modules.imported, rows, "environment.use=rooms:room")
    assert "TypeError" in said and "train.jsonl, line 10" in said and "rooms.py, line 3" in said
