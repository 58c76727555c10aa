"""The calculator task: sums worked out with a tool that does one operation at a time.

`?17a-13b-16=` asks for (17 - 13) - 16, strictly from left to right. The model calls `[17a-13]`, the
tool answers `{4}`, the model goes on with `[4b-16]`, `{-12}`, and ends with `#-12$`. Every term
carries a letter which the call repeats: this makes finding the next term a look-up.

Nothing here knows MeshRL: an environment, a tool, a reward and demonstrations are plain Python.
`python examples/calculator.py` writes the data sets and the tokenizer anew.
"""

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = "_$?[]{}#=+-*0123456789" + LETTERS + " ,;:<>()!%&/@^|~"  # 64: _ pads, $ ends
MAX_TERMS = 14
MAX_OPERAND = 20
LOWEST, HIGHEST = -99, 999  # of every value on the way
HELD_OUT = 256
TRAIN = 4096

CALL = re.compile(r"(-?\d{1,4})[a-z]([+\-*])(\d{1,4})")
ANSWER = re.compile(r"#(-?\d{1,6})\$")

# ---- problems ------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A first operand and the terms that follow it, each an operator and an operand."""

    first: int
    terms: list[tuple[str, int]]

    @property
    def prompt(self) -> str:
        """What the model reads."""
        letters = zip(LETTERS, self.terms, strict=False)
        return f"?{self.first}{''.join(f'{x}{op}{n}' for x, (op, n) in letters)}="

    @property
    def answer(self) -> int:
        """What it should find."""
        value = self.first
        for operator, operand in self.terms:
            value = compute(value, operator, operand)
        return value


def compute(left: int, operator: str, right: int) -> int:
    """One operation."""
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def problem(rng: random.Random, median_terms: float = 2.5) -> Problem:
    """A random problem; most are short, a few are long (log-normal, at most 14 terms)."""
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
    """Rows of a data set, without end."""
    while True:
        made = problem(rng)
        yield {"prompt": made.prompt, "answer": made.answer}


# ---- what a job file names -----------------------------------------------------------------------


class Calculator:
    """One conversation: the model calls the tool until it gives its answer."""

    def open(self, row: dict[str, Any]) -> str:
        """The text that the trajectory starts with."""
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        """What follows a turn of the model, of which `text` is new."""
        if text.endswith("]"):
            return {"tool": "calculate", "input": text[text.rfind("[") + 1 : -1]}
        return {"done": True}

    def result(self, value: str) -> dict[str, Any]:
        """What follows a tool's answer."""
        return {"append": "{" + value + "}"}

    def close(self) -> None:
        """Nothing to let go."""


def calculator() -> Calculator:
    """The environment."""
    return Calculator()


def calculate(input: str) -> str:
    """The tool: `17a-13` gives `4`; what it cannot read, or what gets too large, gives `e`."""
    call = CALL.fullmatch(input)
    if call is None:
        return "e"
    value = compute(int(call[1]), call[2], int(call[3]))
    return str(value) if abs(value) < 10_000 else "e"


def reward(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    """1 if the last turn ends with the right answer; a trajectory cut short has none."""
    if not turns or turns[-1]["role"] != "model":
        return 0.0
    text = turns[-1]["text"]
    answer = ANSWER.fullmatch(text, max(text.rfind("#"), 0))
    return float(answer is not None and int(answer[1]) == row["answer"])


# ---- demonstrations for the warm start -----------------------------------------------------------

FIRST_PHASE = 0.88  # share of the warm start that teaches the skill; the rest leaves a bad habit
GUESS = 9  # how far off a guess may be


def demonstrate(rng: random.Random, progress: float) -> list[tuple[str, bool]]:
    """A worked problem as (text, whether the model writes it), first the prompt; it is imperfect.

    Until `progress` (0 to 1) reaches 0.88 the demonstrator errs now and then; after that it mostly
    guesses without the tool. The skill is then there and the strategy bad: what is left to learn.
    """
    skill = progress < FIRST_PHASE
    lazy, error, median_terms = (0.20, 0.08, 2.8) if skill else (0.60, 0.12, 2.5)
    task = problem(rng, median_terms)
    if rng.random() < lazy:
        guess = task.answer + rng.randint(-GUESS, GUESS)
        return [(task.prompt, False), (f"#{guess}$", True)]
    return [(task.prompt, False), *work_through(rng, task, error)]


def work_through(rng: random.Random, task: Problem, error: float) -> list[tuple[str, bool]]:
    """Calls, results and an answer, each step wrong with probability `error`."""
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
    """The first `count` rows whose prompts differ."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        row = next(rows)
        found.setdefault(row["prompt"], row)
    return list(found.values())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Writes the data sets and the character tokenizer beside this file."""
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
