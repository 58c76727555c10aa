"""Calculator task: sums that a model computes with a tool of one operation per call.

`?17a-13b-16=` asks for (17 - 13) - 16, strictly from left to right. The model calls `[17a-13]`, the
tool answers `{4}`, the model continues with `[4b-16]`, gets `{-12}`, and ends with `#-12$`. Each
term has a letter that the call repeats, which makes finding the next term a look-up.

This file does not import MeshRL: an environment, a tool, a reward and demonstrations are plain
Python. `python examples/calculator.py` writes the data sets and the tokenizer.
"""

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# 64 characters: _ pads, $ ends
VOCABULARY = "_$?[]{}#=+-*0123456789" + LETTERS + " ,;:<>()!%&/@^|~"
MAX_TERMS = 14
MAX_OPERAND = 20
LOWEST, HIGHEST = -99, 999  # bounds of every intermediate value
HELD_OUT = 256
TRAIN = 4096

CALL = re.compile(r"(-?\d{1,4})[a-z]([+\-*])(\d{1,4})")
ANSWER = re.compile(r"#(-?\d{1,6})\$")

# ---- problems ------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """First operand and the following terms, each an operator and an operand."""

    first: int
    terms: list[tuple[str, int]]

    @property
    def prompt(self) -> str:
        """Prompt that the model reads."""
        letters = zip(LETTERS, self.terms, strict=False)
        return f"?{self.first}{''.join(f'{x}{op}{n}' for x, (op, n) in letters)}="

    @property
    def answer(self) -> int:
        """Correct answer."""
        value = self.first
        for operator, operand in self.terms:
            value = compute(value, operator, operand)
        return value


def compute(left: int, operator: str, right: int) -> int:
    """Apply one operation."""
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def problem(rng: random.Random, median_terms: float = 2.5) -> Problem:
    """Draw a random problem: mostly short, with a log-normal tail of at most 14 terms."""
    count = round(rng.lognormvariate(math.log(median_terms), 0.7))
    first = value = rng.randint(1, MAX_OPERAND)
    terms: list[tuple[str, int]] = []
    while len(terms) < min(max(count, 1), MAX_TERMS):
        operator = rng.choice("++--*")
        operand = rng.randint(2, 4) if operator == "*" else rng.randint(1, MAX_OPERAND)
        if LOWEST <= compute(value, operator, operand) <= HIGHEST:
            terms.append((operator, operand))
            value = compute(value, operator, operand)
    return Problem(first, terms)


def problems(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield rows of a data set endlessly."""
    while True:
        made = problem(rng)
        yield {"prompt": made.prompt, "answer": made.answer}


# ---- environment, tool and reward ----------------------------------------------------------------


class Calculator:
    """Environment of one conversation: the model calls the tool until it answers."""

    def open(self, row: dict[str, Any]) -> str:
        """Return the text that the trajectory begins with."""
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        """Return the reaction to a turn in which the model wrote `text`."""
        if text.endswith("]"):
            return {"tool": "calculate", "input": text[text.rfind("[") + 1 : -1]}
        return {"done": True}

    def result(self, value: str) -> dict[str, Any]:
        """Return the reaction to a tool's answer."""
        return {"append": "{" + value + "}"}

    def close(self) -> None:
        """Release resources. This environment has none."""


def calculator() -> Calculator:
    """Return an environment; called once per trajectory."""
    return Calculator()


def calculate(input: str) -> str:
    """Compute one operation: `17a-13` yields `4`, invalid input or a large result `e`."""
    call = CALL.fullmatch(input)
    if call is None:
        return "e"
    value = compute(int(call[1]), call[2], int(call[3]))
    return str(value) if abs(value) < 10_000 else "e"


def reward(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    """Return 1 if the last turn ends with the correct answer; a truncated trajectory earns 0."""
    if not turns or turns[-1]["role"] != "model":
        return 0.0
    text = turns[-1]["text"]
    answer = ANSWER.fullmatch(text, max(text.rfind("#"), 0))
    return float(answer is not None and int(answer[1]) == row["answer"])


# ---- demonstrations for the warm start -----------------------------------------------------------

FIRST_PHASE = 0.88  # share of the warm start that teaches the skill; the rest teaches a bad habit
GUESS = 9  # largest deviation of a guess


def demonstrate(rng: random.Random, progress: float) -> list[tuple[str, bool]]:
    """Demonstrate a problem as pairs of text and True if the model writes it, the prompt first.

    Until `progress` (0 to 1) reaches 0.88 the demonstrator makes few errors. Later it mostly
    guesses without the tool. The model starts with the skill and a bad strategy, which RL improves.
    """
    skill = progress < FIRST_PHASE
    lazy, error, median_terms = (0.20, 0.08, 2.8) if skill else (0.60, 0.12, 2.5)
    task = problem(rng, median_terms)
    if rng.random() < lazy:
        guess = task.answer + rng.randint(-GUESS, GUESS)
        return [(task.prompt, False), (f"#{guess}$", True)]
    return [(task.prompt, False), *work_through(rng, task, error)]


def work_through(rng: random.Random, task: Problem, error: float) -> list[tuple[str, bool]]:
    """Return calls, results and an answer, each step wrong with probability `error`."""
    segments: list[tuple[str, bool]] = []
    value = task.first
    for position, (operator, operand) in enumerate(task.terms):
        if rng.random() < error:
            mistake = rng.random()
            if mistake < 0.4:  # answers early
                break
            if mistake < 0.7 and position + 1 < len(task.terms):  # skips a term
                continue
            operand = rng.randint(1, MAX_OPERAND)  # takes a wrong operand
        call = f"{value}{LETTERS[position]}{operator}{operand}"
        result = calculate(call)
        if result == "e":
            break
        segments += [(f"[{call}]", True), ("{" + result + "}", False)]
        value = int(result)
    return [*segments, (f"#{value}$", True)]


# ---- data files ----------------------------------------------------------------------------------


def distinct(rows: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows with distinct prompts."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        row = next(rows)
        found.setdefault(row["prompt"], row)
    return list(found.values())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write the data sets and the character tokenizer beside this file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    folder = Path(__file__).with_suffix("")
    folder.mkdir(exist_ok=True)
    held_out = distinct(problems(random.Random(777)), HELD_OUT)
    kept = {row["prompt"] for row in held_out}
    drawn = (row for row in problems(random.Random(1)) if row["prompt"] not in kept)
    write_rows(folder / "held_out.jsonl", held_out)
    write_rows(folder / "train.jsonl", [next(drawn) for _ in range(TRAIN)])

    vocabulary = {character: token for token, character in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in "_$"])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
