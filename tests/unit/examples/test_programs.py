"""The code task: its tasks, their test cases, its demonstrations and its data files."""

import ast
import importlib.util
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from meshrl.job import jobfile

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = EXAMPLES / "code"
specification = importlib.util.spec_from_file_location("programs", EXAMPLES / "programs.py")
assert specification is not None and specification.loader is not None
programs = importlib.util.module_from_spec(specification)
specification.loader.exec_module(programs)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FILES / name).read_text().splitlines()]


def passes(row: dict[str, Any], text: str) -> bool:
    """Whether a program of the example's own making passes the row's tests."""
    names: dict[str, Any] = {}
    exec(row["prompt"] + text, names)
    try:
        outputs = [names[row["tests"]["function"]](*case["args"]) for case in row["tests"]["cases"]]
    except (IndexError, ValueError, TypeError, ZeroDivisionError):
        return False
    return outputs == [case["output"] for case in row["tests"]["cases"]]


def drawn(rng: random.Random) -> tuple[Any, dict[str, Any]]:
    """A task and its row."""
    while True:
        made = programs.task(rng)
        if cases := programs.cases(rng, made):
            row = {"prompt": made.prompt, "tests": {"function": "f", "cases": cases}}
            return made, row


def test_a_prompt_and_what_the_model_writes_are_one_program() -> None:
    row = {
        "prompt": "#a:odd,b:double>sum\ndef f(x):",
        "tests": {"function": "f", "cases": [{"args": [[3, 1, 2]], "output": 8}]},
    }
    assert passes(row, "a=[v for v in x if v%2];b=[v*2 for v in a];return sum(b)")
    assert passes(row, "return sum(v+v for v in x if v%2)")
    assert not passes(row, "return sum(x)")


def test_right_programs_pass_however_they_are_written() -> None:
    rng = random.Random(5)
    ways = set()
    for _ in range(200):
        made, row = drawn(rng)
        for fuse in [0.0, 0.5, 1.0]:
            written = programs.program(made, rng, fuse)
            assert passes(row, written), (row["prompt"], written)
            ways.add(written)
        assert passes(row, programs.program(made))
    assert len(ways) > 300


def test_skipping_the_steps_and_leaving_one_out_mostly_fail() -> None:
    rng = random.Random(6)
    made = [drawn(rng) for _ in range(300)]
    lazy = [passes(row, programs.program(programs.Task([], task.end))) for task, row in made]
    short = [
        passes(row, programs.program(programs.Task(task.steps[1:], task.end))) for task, row in made
    ]
    assert 0 < sum(lazy) < 0.2 * len(made)
    assert 0 < sum(short) < 0.5 * len(made)


def test_outputs_of_a_task_differ_and_its_length_has_a_tail() -> None:
    rng = random.Random(7)
    counts = []
    for _ in range(500):
        made, row = drawn(rng)
        counts.append(len(made.steps))
        outputs = [case["output"] for case in row["tests"]["cases"]]
        assert len(outputs) == 4 and all(outputs.count(output) == 1 for output in outputs)
    assert min(counts) == 1 and max(counts) == 8
    assert 2.2 < sum(counts) / len(counts) < 3.2


def test_the_data_files_are_what_the_script_writes() -> None:
    held_out, train = rows("held_out.jsonl"), rows("train.jsonl")
    assert len(held_out) == 256 and len(train) == 1024
    assert len({row["prompt"] for row in held_out}) == 256
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}
    assert held_out == programs.distinct(programs.rows(random.Random(777)), 256)


def test_demonstrations_err_little_at_first_and_skip_the_steps_at_last() -> None:
    def lazy(progress: float) -> float:
        rng = random.Random(3)
        texts = [programs.demonstrate(rng, progress)[1][0] for _ in range(1000)]
        skip: list[bool] = [text.startswith("return ") and " for " not in text for text in texts]
        return sum(skip) / 1000

    assert 0.10 < lazy(0.5) < 0.25
    assert 0.55 < lazy(0.9) < 0.75


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.9])
def test_demonstrations_are_programs_with_a_prompt_and_an_end_of_few_kinds_of_syntax(
    progress: float,
) -> None:
    rng = random.Random(11)
    for _ in range(300):
        (prompt, given), (text, written) = programs.demonstrate(rng, progress)
        assert prompt.startswith("#") and prompt.endswith(programs.HEAD) and not given
        assert written and text.endswith("$") and text.count("$") == 1
        (function,) = ast.parse(prompt + text[:-1]).body
        assert isinstance(function, ast.FunctionDef) and isinstance(function.body[-1], ast.Return)
        assert set(prompt + text) <= set(programs.VOCABULARY)
        assert len(prompt + text) < 400


def test_the_tokenizer_has_a_token_for_every_character_and_ends_with_the_dollar() -> None:
    tokenizer = Tokenizer.from_file(str(FILES / "tokenizer.json"))
    text = "#a:down>sum\ndef f(x):a=sorted(x,reverse=True);return sum(a)$"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) == len(text) and tokens[0] == 2 and tokens[-1] == 1
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 64


def test_the_job_file_names_what_there_is() -> None:
    job = tomllib.loads((EXAMPLES / "code.toml").read_text())
    jobfile.load(EXAMPLES / "code.toml", [])
    assert job["rollout"]["stop"] == ["$"]
    assert job["reward"]["options"] == {
        "tests": "tests",
        "prefix": programs.HEAD,
        "partial": False,
        "case_s": 1.0,
    }
    for path in [job["dataset"]["train"], job["dataset"]["held_out"], job["model"]["tokenizer"]]:
        assert (EXAMPLES / path).exists()
    module, _, function = job["warm_start"]["demonstrations"].partition(":")
    assert module == "programs" and callable(getattr(programs, function))
