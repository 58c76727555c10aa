"""Calculator and code examples: problems, tools, rewards, demonstrations and files."""

from __future__ import annotations

import ast
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
from meshrl.job import job_reader

EXAMPLES = Path(__file__).parents[3] / "examples"


def load_example(name: str) -> Any:
    """Import an example's module by its file."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


calculator, programs = load_example("calculator"), load_example("programs")


def rows(folder: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / folder / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("folder", "count", "draw"),
    [
        ("calculator", 4096, lambda: calculator.problems(random.Random(777))),
        ("code", 1024, lambda: programs.rows(random.Random(777))),
    ],
)
def test_data_files_match_their_script(folder: str, count: int, draw: Callable[[], Any]) -> None:
    held_out, train = rows(folder, "held_out.jsonl"), rows(folder, "train.jsonl")
    assert len(held_out) == 256 and len(train) == count
    assert len({row["prompt"] for row in held_out}) == 256
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}
    module = calculator if folder == "calculator" else programs
    assert held_out == module.distinct(draw(), 256)


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("calculator", "?17a-13=[17a-13]{4}#4$"),
        ("code", "#a:down>sum\ndef f(x):a=sorted(x,reverse=True);return sum(a)$"),
    ],
)
def test_tokenizer_covers_every_character_and_ends_with_the_dollar(folder: str, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(EXAMPLES / folder / "tokenizer.json"))
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) == len(text) and tokens[-1] == 1
    assert folder == "calculator" or tokens[0] == 2
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 64


def converse(row: dict[str, Any], turns: list[str]) -> list[dict[str, Any]]:
    """Play the model's `turns` against the environment as a rollout shard does."""
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


def test_tool_computes_one_operation_at_a_time() -> None:
    assert calculator.calculate("17a-13") == "4"
    assert calculator.calculate("-4b*16") == "-64"
    assert calculator.calculate("9999c+1") == "e"
    for unreadable in ["", "17-13", "1a+2b+3", "17a/2", "a+1", "17A+1", "1a+ 2", "1a+2\n"]:
        assert calculator.calculate(unreadable) == "e"


def test_correct_conversation_has_reward_1() -> None:
    row = {"prompt": "?17a-13b-16=", "answer": -12}
    turns = converse(row, ["[17a-13]", "[4b-16]", "#-12$"])
    assert [turn.get("appended") for turn in turns] == [None, "{4}", None, "{-12}", None]
    assert calculator.reward(row, turns) == 1.0


@pytest.mark.parametrize("last", ["#-13$", "#-12", "#-12$$", "-12$", "#$", "", "#1_2$", "# -12$"])
def test_wrong_or_unfinished_answer_has_reward_0(last: str) -> None:
    row = {"prompt": "?17a-13b-16=", "answer": -12}
    assert calculator.reward(row, converse(row, ["[17a-13]", last])) == 0.0


def test_conversation_without_a_final_model_turn_has_reward_0() -> None:
    row = {"prompt": "?1a+1=", "answer": 2}
    assert calculator.reward(row, []) == 0.0
    assert calculator.reward(row, converse(row, ["[1a+1]"])) == 0.0


def test_intermediate_values_stay_in_range_and_lengths_have_a_tail() -> None:
    rng = random.Random(5)
    counts = []
    for _ in range(2000):
        task = calculator.problem(rng)
        counts.append(len(task.terms))
        assert -99 <= task.answer <= 999
    assert min(counts) == 1 and max(counts) == 14
    assert 3.0 < sum(counts) / len(counts) < 3.5


def test_demonstrations_have_few_errors_early_and_guess_late() -> None:
    def compute_share(progress: float, test: Callable[[list[tuple[str, bool]]], bool]) -> float:
        rng = random.Random(3)
        return sum(test(calculator.demonstrate(rng, progress)) for _ in range(1000)) / 1000

    def is_guess(segments: list[tuple[str, bool]]) -> bool:
        return len(segments) == 2

    assert 0.15 < compute_share(0.0, is_guess) < 0.35
    assert 0.55 < compute_share(0.9, is_guess) < 0.75


def test_demonstration_matches_environment_and_tool() -> None:
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


def test_calculator_job_file_is_valid() -> None:
    document = tomllib.loads((EXAMPLES / "calculator.toml").read_text())
    job = JobConfig.from_document(document)
    assert job.rollout.stop == ["]", "$"]
    assert (EXAMPLES / job.dataset.train).exists() and (EXAMPLES / job.model.tokenizer).exists()


def passes_tests(row: dict[str, Any], text: str) -> bool:
    """Return True if the example's program passes the row's tests."""
    names: dict[str, Any] = {}
    exec(row["prompt"] + text, names)
    try:
        outputs = [names[row["tests"]["function"]](*case["args"]) for case in row["tests"]["cases"]]
    except (IndexError, ValueError, TypeError, ZeroDivisionError):
        return False
    return outputs == [case["output"] for case in row["tests"]["cases"]]


def draw_task(rng: random.Random) -> tuple[Any, dict[str, Any]]:
    """Draw a task and its row."""
    while True:
        made = programs.task(rng)
        if cases := programs.cases(rng, made):
            row = {"prompt": made.prompt, "tests": {"function": "f", "cases": cases}}
            return made, row


def test_prompt_and_completion_form_one_program() -> None:
    row = {
        "prompt": "#a:odd,b:double>sum\ndef f(x):",
        "tests": {"function": "f", "cases": [{"args": [[3, 1, 2]], "output": 8}]},
    }
    assert passes_tests(row, "a=[v for v in x if v%2];b=[v*2 for v in a];return sum(b)")
    assert passes_tests(row, "return sum(v+v for v in x if v%2)")
    assert not passes_tests(row, "return sum(x)")


def test_correct_programs_pass_in_any_style() -> None:
    rng = random.Random(5)
    ways = set()
    for _ in range(200):
        made, row = draw_task(rng)
        for fuse in [0.0, 0.5, 1.0]:
            written = programs.program(made, rng, fuse)
            assert passes_tests(row, written), (row["prompt"], written)
            ways.add(written)
        assert passes_tests(row, programs.program(made))
    assert len(ways) > 300


def test_programs_without_all_steps_mostly_fail() -> None:
    rng = random.Random(6)
    made = [draw_task(rng) for _ in range(120)]
    skipped = [
        passes_tests(row, programs.program(programs.Task([], task.end))) for task, row in made
    ]
    short = [
        passes_tests(row, programs.program(programs.Task(task.steps[1:], task.end)))
        for task, row in made
    ]
    assert 0 < sum(skipped) < 0.2 * len(made)
    assert 0 < sum(short) < 0.5 * len(made)


def test_task_outputs_differ_and_lengths_have_a_tail() -> None:
    rng = random.Random(7)
    counts = []
    for _ in range(250):
        made, row = draw_task(rng)
        counts.append(len(made.steps))
        outputs = [case["output"] for case in row["tests"]["cases"]]
        assert len(outputs) == 4 and all(outputs.count(output) == 1 for output in outputs)
    assert min(counts) == 1 and max(counts) == 8
    assert 2.2 < sum(counts) / len(counts) < 3.2


def test_demonstrations_have_few_errors_early_and_skip_steps_late() -> None:
    def compute_skip_share(progress: float) -> float:
        rng = random.Random(3)
        texts = [programs.demonstrate(rng, progress)[1][0] for _ in range(400)]
        skip: list[bool] = [text.startswith("return ") and " for " not in text for text in texts]
        return sum(skip) / len(skip)

    assert 0.10 < compute_skip_share(0.5) < 0.25
    assert 0.55 < compute_skip_share(0.9) < 0.75


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.9])
def test_demonstrations_have_a_prompt_an_end_and_few_kinds_of_syntax(
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


def test_code_job_file_names_existing_files_and_functions() -> None:
    job = tomllib.loads((EXAMPLES / "code.toml").read_text())
    job_reader.load_config(EXAMPLES / "code.toml", [])
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
