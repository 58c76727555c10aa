"""The reward `math`: whether the answer equals the row's, by Hugging Face's math-verify.

math-verify reads LaTeX and compares with sympy. Around it: what is the answer in what the model
said, spellings that math-verify does not read, and answers that are none. Runs in workers that are
killed when they take too long, as sympy may take for ever.
"""

from __future__ import annotations

import re
import signal
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, E, Expr, I, N, Pow, UnevaluatedExpr, cos, exp
from sympy.core.relational import Relational

from meshrl.common.grading import golds
from meshrl.common.grading.answers import answer_of
from meshrl.services.sandbox.grading.mathematics import characters, final_answer, latex, notations
from meshrl.services.sandbox.grading.mathematics.final_answer import Stated

LONGEST = 100_000  # characters of an answer that is looked at; what is longer is wrong
BOXED = 2_000  # longest content of a box
CPU_S = 4.0  # for one pair; sympy that takes longer does not find them equal

DIGITS = 30  # in which two numbers are compared once more
FAR = 1e-5  # of the larger: what six decimals let pass for numbers from 0.1 on
NOISE = 1e-80  # below it a difference is the arithmetic's own
NAMED = r"(?:\\?\(|\$)?(?:[A-Za-z]\s*=\s*)?(-?\d+(?:[./]\d+)?)(?:\\?\)|\$)?"
OR = re.compile(rf"{NAMED}\s*,?\s+or\s+(?:else\s+)?{NAMED}[\s.*]*$")

# Numbers that nobody writes out, which sympy would try to.
TOWER = re.compile(
    r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^|\^\s*\w+\s*\^\s*\w+\s*\^|\^\s*\{\s*\d{2,}\s*\^"
    r"|\^\s*\{?\s*\d{6,}|\d{5,}\s*!|!\s*!|\\binom\s*\{\s*(?:\d{5,}|[^{}]*\^)"
)
VALUE_RELATION = re.compile(r"\\(?:ge|le|geq|leq|gt|lt|ne|neq)(?![a-z])|[<>]")
RELATION = re.compile(r"[<>=]|\\(?:ge|le|geq|leq|gt|lt|ne|neq)(?![a-z])")
TEXT_ONLY = re.compile(latex.TEXT + r"\s*\{[^{}]*\}")
NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
ROUND = re.compile(r"\s*(?:\\left)?\([^()]*\)\s*")
CURLY = re.compile(r"(?:\\left)?\\\{[^()]*\\\}")
TRUTH = ("yes", "no")  # short words that are no product of variables
_UNITS: dict[str, dict[str, Fraction | int]] = {
    "m": {"mm": Fraction(1, 1000), "cm": Fraction(1, 100), "m": 1, "meter": 1, "km": 1000},
    "g": {"g": 1, "kg": 1000},
    "s": {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800},
}
UNITS = {name: (kind, Fraction(by)) for kind, row in _UNITS.items() for name, by in row.items()}


class _TooLong(BaseException):
    """The pair has had its CPU time. No library's `except Exception` keeps it."""


def reward(row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]) -> float:
    """1 if the answer equals `row[options["answer"]]`."""
    gold, answer = golds.mathematics(row, options), answer_of(turns, options)
    return float(answer is not None and equal(gold, answer))


def equal(gold: str, answer: str) -> bool:
    """True if `answer`, all that was said after the reasoning, comes to `gold`."""
    if len(answer) > LONGEST:
        return False
    before = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        gold, answer = characters.plain(gold), characters.plain(answer)
        if len(found := list(latex.boxes(gold))) and found[-1][2].strip():  # a solution's own
            gold = found[-1][2]
        return any(_reads(gold, one) for one in final_answer.stated(answer))
    except (_TooLong, ValueError, TypeError, ArithmeticError, RecursionError, AttributeError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _reads(gold: str, stated: Stated) -> bool:
    said, boxed = stated.text, stated.alone
    if not said.strip() or (boxed and len(said) > BOXED) or golds.CODE.search(said):
        return False
    if not boxed and (match := OR.search(said[-200:])):  # two numbers to choose from: both are said
        said, boxed = f"{match[1]}, {match[2]}", True
    wanted, said = latex.cleaned(gold), latex.cleaned(said) if boxed else said.strip()
    wanted, said = notations.united(wanted), notations.united(said) if boxed else said
    wanted, said = notations.mixed(wanted, False), notations.mixed(said, not boxed)
    if not boxed and (power := notations.scientific(wanted)) and power[1]:
        said = notations.ending(said)
    return _pair(notations.decimal(wanted), notations.decimal(said), boxed)


def _pair(wanted: str, said: str, boxed: bool) -> bool:
    decided = _by_form(wanted, said, boxed)
    return _by_value(wanted, said, boxed) if decided is None else decided


def _by_form(wanted: str, said: str, boxed: bool) -> bool | None:
    """Letters, words, units and answers that are none; None if it takes arithmetic to tell."""
    if choice := latex.letter(wanted, True):
        named = latex.letter(said, boxed)
        if named or not re.fullmatch(r"[a-z]", wanted):  # a small letter may be a variable
            return named == choice
    words, found = latex.words(wanted), latex.words(said)
    if words is not None and found is not None:
        if boxed and (TEXT_ONLY.fullmatch(wanted) or len(words) > 3):
            return _listed(found) == _listed(words)
        sentence = len(found) > 2 * len(words)
        if not boxed and not sentence and (words in TRUTH or len(words) > 3):
            return found == words
    if said == wanted:
        return True
    if TOWER.search(said):
        return False
    numbers = notations.scientific(wanted), notations.scientific(said)
    if numbers[0] and numbers[1] and (numbers[0][1] or numbers[1][1]):
        return notations.close(numbers[0][0], numbers[1][0])
    if (by_name := _by_name(wanted, said)) is not None:
        return by_name
    measures = _measure(wanted), _measure(said)
    if measures[0] and measures[1] and measures[0][1:] != measures[1][1:]:
        (a, kind, factor), (b, other, scale) = measures[0], measures[1]
        return kind == other and a * factor == b * scale
    if boxed and not RELATION.search(wanted) and VALUE_RELATION.match(said):
        return False  # "\ge 7" is no value
    if boxed and CURLY.fullmatch(wanted) and ROUND.fullmatch(said):
        return False  # {1, 2} is not (1, 2)
    return None


def _by_name(wanted: str, said: str) -> bool | None:
    """Whether the same names have the same values; None if neither side names any."""
    due, given = notations.named(wanted), notations.named(said)
    if due is not None and given is not None:
        return due.values.keys() == given.values.keys() and all(
            _pair(value, given.values[name], True) for name, value in due.values.items()
        )
    named, other = (due, said) if due is not None else (given, wanted)
    values = notations.listed(other)
    if named is None or values is None or CURLY.fullmatch(other):
        return None
    ordered = [named.values[name] for name in named.order]
    return len(ordered) == len(values) and all(
        _pair(a, b, True) for a, b in zip(ordered, values, strict=True)
    )


def _by_value(wanted: str, said: str, boxed: bool) -> bool:
    if boxed and NUMBER.fullmatch(wanted) and said.count("=") == 1:
        left, right = said.split("=")
        if NUMBER.fullmatch(left) and NUMBER.fullmatch(right) and float(left) != float(right):
            return False  # "8 = 7"
        if re.fullmatch(r"\s*[a-zA-Z]\s*", right):  # "3 = x"
            said = left
    gold = parse(f"\\boxed{{{wanted}}}", parsing_timeout=None)
    # In a box nothing but LaTeX counts: else the last number in it would.
    how = {"extraction_config": [LatexExtractionConfig()]} if boxed else {}
    text = f"\\boxed{{{said}}}" if boxed else said
    found = parse(text, parsing_timeout=None, **how)
    if _verified(gold, found):
        return True
    turns = any(map(_turns, (*gold, *found)))
    return turns and _verified(_complex(gold), _complex(found))


def _verified(gold: list[Any], found: list[Any]) -> bool:
    same = verify(gold, found, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same) and not _far(gold, found)


def _turns(value: Any) -> bool:
    """Whether it has i in an exponent of e, both of which math-verify takes for variables."""
    if not isinstance(value, Basic):
        return False
    powers = [p.as_base_exp() for p in value.atoms(exp, Pow)]
    return any(
        str(base) in ("e", "E") and "i" in map(str, exponent.free_symbols)
        for base, exponent in powers
    )


def _complex(parsed: list[Any]) -> list[Any]:
    """What was parsed, with i for the imaginary unit and e for Euler's number."""
    units = {"i": I, "e": E}
    return [
        value.subs({s: units[s.name] for s in value.free_symbols if s.name in units}).rewrite(cos)
        if isinstance(value, Basic) and not isinstance(value, Relational)
        else value
        for value in parsed
    ]


def _far(gold: list[Any], found: list[Any]) -> bool:
    """Whether two numbers, of which math-verify has compared six decimals, are far apart in
    relation to their size: 0 is not 6.6e-34.
    """
    numbers = [
        N(value, DIGITS)
        for value in (*gold[:1], *found[:1])
        if isinstance(value, Expr)
        and not value.has(UnevaluatedExpr)  # of percents: 50% is 50, too
        and value.is_number
    ]
    if len(numbers) < 2:
        return False
    a, b = numbers
    return bool(abs(a - b) > FAR * max(abs(a), abs(b)) and abs(a - b) > NOISE)


def _stop(*_: Any) -> None:
    raise _TooLong


def _listed(words: str) -> str:
    return re.sub(r",? and |, ?", ", ", words)


def _measure(text: str) -> tuple[Fraction, str, Fraction] | None:
    """(number, kind, factor) of `12\\text{ cm}`."""
    pattern = r"(-?\d+(?:\.\d+)?)(?:\s|\\[,; ]|~)*" + latex.TEXT + r"\s*\{[\s~]*([A-Za-z]+)\s*\}"
    match = re.fullmatch(pattern, text)
    unit = match and (UNITS.get(match[2]) or UNITS.get(match[2].lower().rstrip("s")))
    return (Fraction(match[1]), *unit) if match and unit else None
