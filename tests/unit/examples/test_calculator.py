"""The calculator task: its problems, its tool, its reward and its demonstrations."""

import importlib.util
import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from meshrl.common.job.config import JobConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = EXAMPLES / "calculator"
specification = importlib.util.spec_from_file_location("calculator", EXAMPLES / "calculator.py")
assert specification is not None and specification.loader is not None
calculator = importlib.util.module_from_spec(specification)
specification.loader.exec_module(calculator)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FILES / name).read_text().splitlines()]


def converse(row: dict[str, Any], turns: list[str]) -> list[dict[str, Any]]:
    """Plays the model's `turns` against the environment, as a rollout shard would."""
    environment = calculator.calculator()
    environment.open(row)
    log = []
    for text in turns:
        log.append({"role": "model", "text": text})
        action = environment.step(text)
        if "tool" in action:
            value = calculator.calculate(action["input"])
            log.append({"role": "tool", "name": action["tool"], "value": value} | action)
            log[-1]["appended"] = environment.result(value)["append"]
    environment.close()
    return log


def test_the_tool_does_one_operation_at_a_time() -> None:
    assert calculator.calculate("17a-13") == "4"
    assert calculator.calculate("-4b*16") == "-64"
    assert calculator.calculate("9999c+1") == "e"
    for unreadable in ["", "17-13", "1a+2b+3", "17a/2", "a+1", "17A+1", "1a+ 2", "1a+2\n"]:
        assert calculator.calculate(unreadable) == "e"


def test_a_correct_conversation_earns_the_reward() -> None:
    row = {"prompt": "?17a-13b-16=", "answer": -12}
    turns = converse(row, ["[17a-13]", "[4b-16]", "#-12$"])
    assert [turn.get("appended") for turn in turns] == [None, "{4}", None, "{-12}", None]
    assert calculator.reward(row, turns) == 1.0


@pytest.mark.parametrize("last", ["#-13$", "#-12", "#-12$$", "-12$", "#$", "", "#1_2$", "# -12$"])
def test_a_wrong_or_unfinished_answer_earns_nothing(last: str) -> None:
    row = {"prompt": "?17a-13b-16=", "answer": -12}
    assert calculator.reward(row, converse(row, ["[17a-13]", last])) == 0.0


def test_nothing_is_earned_without_a_last_turn_of_the_model() -> None:
    row = {"prompt": "?1a+1=", "answer": 2}
    assert calculator.reward(row, []) == 0.0
    assert calculator.reward(row, converse(row, ["[1a+1]"])) == 0.0


def test_the_data_files_are_what_the_script_writes() -> None:
    held_out, train = rows("held_out.jsonl"), rows("train.jsonl")
    assert len(held_out) == 256 and len(train) == 4096
    assert len({row["prompt"] for row in held_out}) == 256
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}
    drawn = calculator.problems(random.Random(777))
    assert held_out == calculator.distinct(drawn, 256)


def test_values_on_the_way_stay_in_range_and_lengths_have_a_tail() -> None:
    rng = random.Random(5)
    counts = []
    for _ in range(2000):
        task = calculator.problem(rng)
        counts.append(len(task.terms))
        assert -99 <= task.answer <= 999
    assert min(counts) == 1 and max(counts) == 14
    assert 3.0 < sum(counts) / len(counts) < 3.5


def test_demonstrations_err_little_at_first_and_guess_at_last() -> None:
    def share(progress: float, test: Callable[[list[tuple[str, bool]]], bool]) -> float:
        rng = random.Random(3)
        return sum(test(calculator.demonstrate(rng, progress)) for _ in range(1000)) / 1000

    def guesses(segments: list[tuple[str, bool]]) -> bool:
        return len(segments) == 2

    assert 0.15 < share(0.0, guesses) < 0.35
    assert 0.55 < share(0.9, guesses) < 0.75


def test_a_demonstration_is_what_the_environment_and_the_tool_would_have_said() -> None:
    rng = random.Random(11)
    for _ in range(200):
        (prompt, by_model), *rest = calculator.demonstrate(rng, 0.5)
        assert prompt.startswith("?") and not by_model
        environment = calculator.calculator()
        for (turn, written), (reply, replied) in zip(rest[:-1:2], rest[1::2], strict=True):
            action = environment.step(turn)
            value = calculator.calculate(action["input"])
            assert written and not replied and reply == environment.result(value)["append"]
        assert environment.step(rest[-1][0]) == {"done": True}


def test_the_tokenizer_has_a_token_for_every_character_and_ends_with_the_dollar() -> None:
    tokenizer = Tokenizer.from_file(str(FILES / "tokenizer.json"))
    text = "?17a-13=[17a-13]{4}#4$"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) == len(text) and tokens[-1] == 1
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 64


def test_the_job_file_has_only_keys_that_exist() -> None:
    document = tomllib.loads((EXAMPLES / "calculator.toml").read_text())
    job = JobConfig.from_document(document)
    assert job.rollout.stop == ["]", "$"]
    assert (EXAMPLES / job.dataset.train).exists() and (EXAMPLES / job.model.tokenizer).exists()
