"""What `meshrl init` writes is a whole job, and it is what its own script and the document say."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.job import jobfile
from meshrl.starter.creating import EXAMPLES, FILES, GAME

ROOT = Path(__file__).parents[3]


def init(directory: Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["init", str(directory)])
    return found.exit_code, found.output + str(found.exception or "")


def test_a_new_job_is_valid_and_called_as_its_directory(tmp_path: Path) -> None:
    code, said = init(tmp_path / "mine")
    assert code == 0 and f"meshrl run {tmp_path / 'mine/job.toml'}" in said
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == sorted(FILES)
    config, _ = jobfile.load(tmp_path / "mine/job.toml", [])
    assert config.name == "mine"


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_job_of_its_own(tmp_path: Path, example: str) -> None:
    found = CliRunner().invoke(app, ["init", str(tmp_path / "own"), "--example", example])
    assert found.exit_code == 0 and f"meshrl run {tmp_path / 'own'}/{example}.toml" in found.output
    config, _ = jobfile.load(tmp_path / "own" / f"{example}.toml", [])
    assert config.name == "own"
    known = {path.stem for path in (ROOT / "examples").glob("*.toml")}
    assert known == set(EXAMPLES), "each example can be asked for"


def test_an_example_that_there_is_not_is_said(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["init", str(tmp_path / "own"), "--example", "chess"])
    assert found.exit_code == 1 and "calculator, chat, code" in str(found.exception)
    assert not (tmp_path / "own").exists()


def test_nothing_is_overwritten_and_a_bad_name_is_said(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes").write_text("mine")
    code, said = init(taken)
    assert code == 1 and "is there already" in said
    assert [p.name for p in taken.iterdir()] == ["notes"]
    code, said = init(tmp_path / "a b")
    assert code == 1 and "cannot be the name" in said and not (tmp_path / "a b").exists()
    (tmp_path / "file").write_text("")
    code, said = init(tmp_path / "file/job")
    assert code == 1 and "cannot be written" in said


def test_its_script_writes_the_files_that_come_with_it(tmp_path: Path) -> None:
    shutil.copy(GAME / "game.py", tmp_path)
    runpy.run_path(str(tmp_path / "game.py"), run_name="__main__")
    for name in ("train.jsonl", "held_out.jsonl", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (GAME / name).read_bytes()


def test_games_are_won_by_halving_and_rewarded_by_sense() -> None:
    code = runpy.run_path(str(GAME / "game.py"))
    rows = [json.loads(line) for line in (GAME / "train.jsonl").read_text().splitlines()]
    for row in rows:
        turns, game = play(code, row, "halve")
        assert code["reward"](row, turns) == 1.0
        assert game["done"]
    far = next(row for row in rows if row["hidden"] == row["prompt"][0] and row["prompt"][2] == "l")
    turns, _ = play(code, far, "l")
    assert code["reward"](far, turns) == pytest.approx(0.1), "the same letter again has no sense"
    assert code["reward"](far, [{"role": "model", "text": "<"}]) == 0.0


def play(
    code: dict[str, object], row: dict[str, str], how: str
) -> tuple[list[dict[str, str]], Any]:
    """The turns of a game, and what ended it; `how`: halve, or a letter that is always guessed."""
    game = code["game"]()  # type: ignore[operator]
    prompt = game.open(row)
    low, high = ord(prompt[0]), ord(prompt[2])
    turns: list[dict[str, str]] = []
    while True:
        guess = chr((low + high) // 2) if how == "halve" else how
        turns.append({"role": "model", "text": guess})
        said = game.step(guess)
        if said.get("done"):
            return turns, said
        low, high = (low, ord(guess) - 1) if said["append"] == "<" else (ord(guess) + 1, high)


@pytest.mark.parametrize("file", ["job.toml", "game.py"])
def test_the_document_shows_the_whole_of_the_files(file: str) -> None:
    text = (ROOT / "docs/first-job.md").read_text()
    language = "toml" if file.endswith("toml") else "python"
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = (GAME / file).read_text()
    for block in blocks:
        assert block in rest, f"not in {file}:\n{block}"
        rest = rest.replace(block, "", 1)
    assert blocks and not rest.strip(), f"not in the document:\n{rest}"
