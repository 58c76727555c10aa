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

from services.sandbox.grading import latex
from services.sandbox.grading.answers import answer_of

LONGEST = 100_000  # characters of an answer that is looked at; what is longer is wrong
BOXED = 2_000  # longest content of a box
CPU_S = 4.0  # for one pair; sympy that takes longer does not find them equal

# Numbers that nobody writes out, which sympy would try to.
TOWER = re.compile(
    r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^|\^\s*\w+\s*\^\s*\w+\s*\^|\^\s*\{\s*\d{2,}\s*\^"
    r"|\^\s*\{?\s*\d{6,}|\d{5,}\s*!|!\s*!|\\binom\s*\{\s*(?:\d{5,}|[^{}]*\^)"
)
CODE = re.compile(r"__|\b(?:import|lambda|exec|eval|open|getattr)\b")
VALUE_RELATION = re.compile(r"\\(?:ge|le|geq|leq|gt|lt|ne|neq)(?![a-z])|[<>]")
RELATION = re.compile(r"[<>=]|\\(?:ge|le|geq|leq|gt|lt|ne|neq)(?![a-z])")
TEXT_ONLY = re.compile(latex.TEXT + r"\s*\{[^{}]*\}")
NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
ROUND = re.compile(r"\s*(?:\\left)?\([^()]*\)\s*")
CURLY = re.compile(r"(?:\\left)?\\\{[^()]*\\\}")
LENGTHS, MASSES, TIMES = "m", "g", "s"
UNITS = {
    "mm": (LENGTHS, Fraction(1, 1000)),
    "cm": (LENGTHS, Fraction(1, 100)),
    "m": (LENGTHS, Fraction(1)),
    "meter": (LENGTHS, Fraction(1)),
    "km": (LENGTHS, Fraction(1000)),
    "g": (MASSES, Fraction(1)),
    "kg": (MASSES, Fraction(1000)),
    "second": (TIMES, Fraction(1)),
    "minute": (TIMES, Fraction(60)),
    "hour": (TIMES, Fraction(3600)),
    "day": (TIMES, Fraction(86_400)),
    "week": (TIMES, Fraction(604_800)),
}


class _TooLong(BaseException):
    """The pair has had its CPU time. No library's `except Exception` keeps it."""


def reward(row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]) -> float:
    """1 if the answer equals `row[options["answer"]]`."""
    gold = str(row[options.get("answer", "answer")])
    return float(equal(gold, answer_of(turns, options)))


def equal(gold: str, answer: str) -> bool:
    """Whether `answer`, all that was said, comes to `gold`."""
    if len(answer) > LONGEST:
        return False
    before = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        return _equal(gold, answer)
    except (_TooLong, ValueError, TypeError, ArithmeticError, RecursionError, AttributeError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _equal(gold: str, answer: str) -> bool:
    said, boxed = latex.final(answer)
    if not said.strip() or (boxed and len(said) > BOXED) or CODE.search(said):
        return False
    wanted, said = latex.cleaned(gold), latex.cleaned(said) if boxed else said.strip()
    decided = _by_form(wanted, said, boxed)
    if decided is not None:
        return decided
    return _by_value(wanted, said, boxed)


def _by_form(wanted: str, said: str, boxed: bool) -> bool | None:
    """Letters, words, units and answers that are none; None if it takes arithmetic to tell."""
    if choice := latex.letter(wanted, True):
        named = latex.letter(said, boxed)
        if named or not re.fullmatch(r"[a-z]", wanted):  # a small letter may be a variable
            return named == choice
    words = latex.words(wanted)
    if words is not None and (TEXT_ONLY.fullmatch(wanted) or len(words) > 3) and boxed:
        found = latex.words(said)
        if found is not None:
            return _listed(found) == _listed(words)
    if said == wanted:
        return True
    if TOWER.search(said):
        return False
    measures = _measure(wanted), _measure(said)
    if measures[0] and measures[1] and measures[0][1:] != measures[1][1:]:
        (a, kind, factor), (b, other, scale) = measures[0], measures[1]
        return kind == other and a * factor == b * scale
    if boxed and not RELATION.search(wanted) and VALUE_RELATION.match(said):
        return False  # "\ge 7" is no value
    if boxed and CURLY.fullmatch(wanted) and ROUND.fullmatch(said):
        return False  # {1, 2} is not (1, 2)
    return None


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
    same = verify(gold, found, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same)


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
