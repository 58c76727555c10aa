"""Code task: pipelines on a list of numbers, written as Python that is run against test cases.

`#a:odd,b:double>sum` asks for the sum of the doubled odd numbers. The prompt continues with
`def f(x):`, and the model writes the rest of the line, such as `return sum(v+v for v in x if v%2)$`
or `a=[v for v in x if v%2];b=[v*2 for v in a];return sum(b)$`. Any program that passes the tests
counts.

This file does not import MeshRL: demonstrations are plain Python, the reward is MeshRL's
`code_tests`. `python examples/programs.py` writes the data sets and the tokenizer.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = "_$#\n :;,.=+-*/%<>!()[]{}&|^T0123456789" + LETTERS  # 64 characters: _ pads, $ ends
NAMES = LETTERS[:8]  # names of intermediate lists, which limit a task to 8 steps
HEAD = "def f(x):"  # end of the prompt
LARGEST = 9999  # bound of intermediate numbers
CASES = 4
HELD_OUT = 256
TRAIN = 1024

# ---- tasks ---------------------------------------------------------------------------------------

# Words of a step and its forms in Python: N is a number, M a small one, S the list, v its items.
KEEP = {
    "odd": ["v%2", "v%2==1"],
    "even": ["v%2==0", "not v%2"],
    "over N": ["v>N"],
    "under N": ["v<N"],
    "by N": ["v%N==0", "not v%N"],
}
MAP = {
    "double": ["v*2", "v+v"],
    "square": ["v*v", "v**2"],
    "halve": ["v//2"],
    "size": ["abs(v)"],
    "negate": ["-v"],
    "plus N": ["v+N"],
    "minus N": ["v-N"],
    "times N": ["v*N"],
    "mod N": ["v%N"],
    "at most N": ["min(v,N)"],
}
WHOLE = {
    "sort": ["sorted(S)"],
    "down": ["sorted(S)[::-1]", "sorted(S,reverse=True)"],
    "reverse": ["S[::-1]", "list(reversed(S))"],
    "unique": ["sorted(set(S))"],
    "drop M": ["S[M:]"],
    "first M": ["S[:M]"],
    "last M": ["S[-M:]"],
    "every M": ["S[::M]"],
    "gaps": ["[v-u for u,v in zip(S,S[1:])]"],
    "sums": ["[sum(S[:i+1]) for i in range(len(S))]"],
}
END = {
    "sum": ["sum(S)"],
    "max": ["max(S)"],
    "min": ["min(S)"],
    "count": ["len(S)"],
    "span": ["max(S)-min(S)"],
    "mean": ["sum(S)//len(S)"],
    "head": ["S[0]"],
    "tail": ["S[-1]"],
    "list": ["S"],
}
KINDS = [KEEP, MAP, WHOLE, END]


class Step(NamedTuple):
    """Step in words and its equivalent forms in Python."""

    words: str
    forms: list[str]
    kind: int  # index into KINDS


class Task(NamedTuple):
    """Named steps from list to list, and the value to return of the last list."""

    steps: list[tuple[str, Step]]
    end: Step

    @property
    def prompt(self) -> str:
        """Prompt that the model reads."""
        steps = ",".join(f"{name}:{step.words}" for name, step in self.steps)
        return f"#{steps}>{self.end.words}\n{HEAD}"


def draw(rng: random.Random, kind: int) -> Step:
    """Draw a random step of a kind."""
    words, forms = rng.choice(list(KINDS[kind].items()))
    numbers = {"N": str(rng.randint(2, 9)), "M": str(rng.randint(2, 3))}
    for letter, number in numbers.items():
        words = words.replace(letter, number)
        forms = [form.replace(letter, number) for form in forms]
    return Step(words, forms, kind)


def task(rng: random.Random, median_steps: float = 2.5) -> Task:
    """Draw a random task: mostly short, with a log-normal tail of at most 8 steps and an end."""
    count = round(rng.lognormvariate(math.log(median_steps), 0.7))
    steps = [draw(rng, rng.choice([0, 1, 1, 2, 2])) for _ in NAMES[: max(count, 1)]]
    return Task(list(zip(NAMES, steps, strict=False)), draw(rng, 3))


# ---- programs and their tests --------------------------------------------------------------------


def program(made: Task, rng: random.Random | None = None, fuse: float = 0.3) -> str:
    """Write the rest of the line that solves a task: one statement per step.

    With `rng`, the forms vary: two steps may become one comprehension, or the last step an argument
    of the returned sum.
    """
    statements: list[str] = []
    source, condition = "x", ""
    after = [*(step for _, step in made.steps), made.end][1:]
    for (name, step), following in zip(made.steps, after, strict=True):
        form = rng.choice(step.forms) if rng else step.forms[0]
        join = rng is not None and rng.random() < fuse
        if step.kind == 0 and following.kind == 1 and join:
            condition = f" if {form}"
            continue
        if step.kind == 0:
            form, condition = "v", f" if {form}"
        value = form.replace("S", source)
        if step.kind < 2:
            value = f"{form} for v in {source}{condition}"
            if following.words in ("sum", "max", "min") and join:
                source = value
                break
            value = f"[{value}]"
        statements.append(f"{name}={value}")
        source, condition = name, ""
    return ";".join([*statements, "return " + made.end.forms[0].replace("S", source)])


def solution(made: Task, x: list[int]) -> Any:
    """Return the correct output for `x`; None for an empty list or a large number on the way."""
    names: dict[str, Any] = {"x": x}
    *steps, end = program(made).split(";")
    for statement in steps:
        exec(statement, names)  # generated above, so it is trusted
        value = names[statement[0]]
        if not value or max(map(abs, value)) > LARGEST:
            return None
    return eval(end.removeprefix("return "), names)


def cases(rng: random.Random, made: Task) -> list[dict[str, Any]]:
    """Return inputs with distinct correct outputs; an empty list if few are found."""
    found: list[dict[str, Any]] = []
    for _ in range(10 * CASES):
        x = [rng.randint(-9, 30) for _ in range(rng.randint(6, 10))]
        output = solution(made, x)
        if output is not None and all(case["output"] != output for case in found):
            found.append({"args": [x], "output": output})
        if len(found) == CASES:
            return found
    return []


def rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield rows of a data set endlessly."""
    while True:
        made = task(rng)
        if tests := cases(rng, made):
            yield {"prompt": made.prompt, "tests": {"function": "f", "cases": tests}}


# ---- demonstrations for the warm start -----------------------------------------------------------

FIRST_PHASE = 0.88  # share of the warm start that teaches the skill; the rest teaches a bad habit


def demonstrate(rng: random.Random, progress: float) -> list[tuple[str, bool]]:
    """Demonstrate a task as pairs of text and True if the model writes it, the prompt first.

    Until `progress` (0 to 1) reaches 0.88 the demonstrator makes few errors. Later it mostly
    returns a value of `x` itself, without the steps. The model starts with the skill and a bad
    habit, which RL improves. No program is tested.
    """
    skill = progress < FIRST_PHASE
    lazy, error, median_steps = (0.15, 0.05, 3.3) if skill else (0.60, 0.10, 2.5)
    made = task(rng, median_steps)
    written = Task([] if rng.random() < lazy else with_errors(rng, made.steps, error), made.end)
    return [(made.prompt, False), (program(written, rng) + "$", True)]


def with_errors(
    rng: random.Random, steps: list[tuple[str, Step]], error: float
) -> list[tuple[str, Step]]:
    """Return the steps with the demonstrator's errors, each step wrong with probability `error`."""
    taken: list[tuple[str, Step]] = []
    for name, step in steps:
        if rng.random() < error:
            mistake = rng.random()
            if mistake < 0.3:  # returns early
                break
            if mistake < 0.6:  # skips a step
                continue
            step = draw(rng, step.kind)  # takes a wrong step
        taken.append((name, step))
    return taken


# ---- data files ----------------------------------------------------------------------------------


def distinct(drawn: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows with distinct prompts."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        row = next(drawn)
        found.setdefault(row["prompt"], row)
    return list(found.values())


def write_rows(path: Path, written: list[dict[str, Any]]) -> None:
    """Write one JSON row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in written))


def main() -> None:
    """Write the data sets and the character tokenizer beside this file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    folder = Path(__file__).with_name("code")
    folder.mkdir(exist_ok=True)
    held_out = distinct(rows(random.Random(777)), HELD_OUT)
    kept = {row["prompt"] for row in held_out}
    drawn = (row for row in rows(random.Random(1)) if row["prompt"] not in kept)
    write_rows(folder / "held_out.jsonl", held_out)
    write_rows(folder / "train.jsonl", [next(drawn) for _ in range(TRAIN)])

    vocabulary = {character: token for token, character in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in "_$"])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
