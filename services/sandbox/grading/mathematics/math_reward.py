"""Reward `math`: whether the answer equals the row's, by Hugging Face's math-verify.

math-verify reads LaTeX and compares with sympy. This module adds the extraction of the answer,
spellings that math-verify does not read, and the rejection of texts that are no answers. It runs in
workers that are killed when they take too long, as sympy may never finish.
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
from meshrl.common.grading.answers import extract_answer
from meshrl.services.sandbox.grading.mathematics import final_answer, latex, notations, unicode_math
from meshrl.services.sandbox.grading.mathematics.final_answer import AnswerReading

MAX_ANSWER_CHARACTERS = 100_000  # most characters of an answer; a longer one is wrong
MAX_BOX_CHARACTERS = 2_000  # longest content of a box
PAIR_CPU_LIMIT_S = 4.0  # for one pair; if sympy takes longer, they count as different

DIGITS = 30  # range of numbers that are compared again
MAX_RELATIVE_ERROR = 1e-5  # of the larger: the precision of six decimals for numbers from 0.1 on
MIN_DIFFERENCE = 1e-80  # smaller differences are rounding errors
NAMED_NUMBER = r"(?:\\?\(|\$)?(?:[A-Za-z]\s*=\s*)?(-?\d+(?:[./]\d+)?)(?:\\?\)|\$)?"
TWO_ALTERNATIVES = re.compile(rf"{NAMED_NUMBER}\s*,?\s+or\s+(?:else\s+)?{NAMED_NUMBER}[\s.*]*$")

# Numbers too long to write out, which sympy would try to.
HUGE_NUMBER = re.compile(
    r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^|\^\s*\w+\s*\^\s*\w+\s*\^|\^\s*\{\s*\d{2,}\s*\^"
    r"|\^\s*\{?\s*\d{6,}|\d{5,}\s*!|!\s*!|\\binom\s*\{\s*(?:\d{5,}|[^{}]*\^)"
)
INEQUALITY = re.compile(r"\\(?:ge|le|geq|leq|gt|lt|ne|neq)(?![a-z])|[<>]")
RELATION = re.compile(r"[<>=]|\\(?:ge|le|geq|leq|gt|lt|ne|neq)(?![a-z])")
TEXT_ONLY = re.compile(latex.TEXT_COMMAND + r"\s*\{[^{}]*\}")
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


class _CpuLimitExceeded(BaseException):
    """Error raised when a pair has used its CPU time.

    As a BaseException it passes through the `except Exception` of libraries.
    """


def compute_reward(
    row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]
) -> float:
    """Return 1 if the answer equals `row[options["answer"]]`, else 0."""
    gold, answer = golds.parse_math_gold(row, options), extract_answer(turns, options)
    return float(answer is not None and is_equal(gold, answer))


def is_equal(gold: str, answer: str) -> bool:
    """Return whether `answer`, all of the text after the reasoning, equals `gold`."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    before = signal.signal(signal.SIGVTALRM, _raise_cpu_limit)
    signal.setitimer(signal.ITIMER_VIRTUAL, PAIR_CPU_LIMIT_S)
    try:
        gold, answer = unicode_math.to_ascii_latex(gold), unicode_math.to_ascii_latex(answer)
        if len(found := list(latex.find_boxes(gold))) and found[-1][2].strip():  # a full solution
            gold = found[-1][2]
        return any(_matches(gold, one) for one in final_answer.read_final_answer(answer))
    except (
        _CpuLimitExceeded,
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
        AttributeError,
    ):
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _matches(gold: str, reading: AnswerReading) -> bool:
    answer, boxed = reading.text, reading.is_bare_value
    if (
        not answer.strip()
        or (boxed and len(answer) > MAX_BOX_CHARACTERS)
        or golds.CODE_PATTERN.search(answer)
    ):
        return False
    if not boxed and (
        match := TWO_ALTERNATIVES.search(answer[-200:])
    ):  # two numbers to choose from: both are given
        answer, boxed = f"{match[1]}, {match[2]}", True
    expected, answer = latex.normalize(gold), latex.normalize(answer) if boxed else answer.strip()
    expected, answer = (
        notations.to_interval_union(expected),
        notations.to_interval_union(answer) if boxed else answer,
    )
    expected, answer = (
        notations.replace_mixed_number(expected, False),
        notations.replace_mixed_number(answer, not boxed),
    )
    if not boxed and (power := notations.parse_scientific(expected)) and power[1]:
        answer = notations.extract_trailing_power(answer)
    return _is_equal_pair(notations.to_base_ten(expected), notations.to_base_ten(answer), boxed)


def _is_equal_pair(gold: str, answer: str, is_bare_value: bool) -> bool:
    decided = _compare_by_form(gold, answer, is_bare_value)
    return _compare_by_value(gold, answer, is_bare_value) if decided is None else decided


def _compare_by_form(gold: str, answer: str, is_bare_value: bool) -> bool | None:
    """Compare letters, words, units and texts without a value; None if it takes arithmetic."""
    if choice := latex.find_choice(gold, True):
        named = latex.find_choice(answer, is_bare_value)
        if named or not re.fullmatch(r"[a-z]", gold):  # a lower-case letter may be a variable
            return named == choice
    words, found = latex.normalize_words(gold), latex.normalize_words(answer)
    if words is not None and found is not None:
        if is_bare_value and (TEXT_ONLY.fullmatch(gold) or len(words) > 3):
            return _normalize_list(found) == _normalize_list(words)
        sentence = len(found) > 2 * len(words)
        if not is_bare_value and not sentence and (words in TRUTH or len(words) > 3):
            return found == words
    if answer == gold:
        return True
    if HUGE_NUMBER.search(answer):
        return False
    numbers = notations.parse_scientific(gold), notations.parse_scientific(answer)
    if numbers[0] and numbers[1] and (numbers[0][1] or numbers[1][1]):
        return notations.is_close(numbers[0][0], numbers[1][0])
    if (by_name := _compare_named_values(gold, answer)) is not None:
        return by_name
    measures = _parse_measure(gold), _parse_measure(answer)
    if measures[0] and measures[1] and measures[0][1:] != measures[1][1:]:
        (a, kind, factor), (b, other, scale) = measures[0], measures[1]
        return kind == other and a * factor == b * scale
    if is_bare_value and not RELATION.search(gold) and INEQUALITY.match(answer):
        return False  # "\ge 7" is no value
    if is_bare_value and CURLY.fullmatch(gold) and ROUND.fullmatch(answer):
        return False  # {1, 2} is not (1, 2)
    return None


def _compare_named_values(gold: str, answer: str) -> bool | None:
    """Return whether the same names have the same values; None if neither side names any."""
    due, given = notations.parse_named_values(gold), notations.parse_named_values(answer)
    if due is not None and given is not None:
        return due.values.keys() == given.values.keys() and all(
            _is_equal_pair(value, given.values[name], True) for name, value in due.values.items()
        )
    named, other = (due, answer) if due is not None else (given, gold)
    values = notations.parse_value_list(other)
    if named is None or values is None or CURLY.fullmatch(other):
        return None
    ordered = [named.values[name] for name in named.order]
    return len(ordered) == len(values) and all(
        _is_equal_pair(a, b, True) for a, b in zip(ordered, values, strict=True)
    )


def _compare_by_value(gold_text: str, answer: str, is_bare_value: bool) -> bool:
    if is_bare_value and NUMBER.fullmatch(gold_text) and answer.count("=") == 1:
        left, right = answer.split("=")
        if NUMBER.fullmatch(left) and NUMBER.fullmatch(right) and float(left) != float(right):
            return False  # "8 = 7"
        if re.fullmatch(r"\s*[a-zA-Z]\s*", right):  # "3 = x"
            answer = left
    gold = parse(f"\\boxed{{{gold_text}}}", parsing_timeout=None)
    # In a box only LaTeX counts: else the last number in it would.
    how = {"extraction_config": [LatexExtractionConfig()]} if is_bare_value else {}
    text = f"\\boxed{{{answer}}}" if is_bare_value else answer
    found = parse(text, parsing_timeout=None, **how)
    if _verify(gold, found):
        return True
    turns = any(map(_has_complex_exponent, (*gold, *found)))
    return turns and _verify(_substitute_complex_units(gold), _substitute_complex_units(found))


def _verify(gold: list[Any], found: list[Any]) -> bool:
    same = verify(gold, found, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same) and not _is_far(gold, found)


def _has_complex_exponent(value: Any) -> bool:
    """Return whether a value has i in an exponent of e; math-verify parses both as variables."""
    if not isinstance(value, Basic):
        return False
    powers = [p.as_base_exp() for p in value.atoms(exp, Pow)]
    return any(
        str(base) in ("e", "E") and "i" in map(str, exponent.free_symbols)
        for base, exponent in powers
    )


def _substitute_complex_units(parsed: list[Any]) -> list[Any]:
    """Replace i by the imaginary unit and e by Euler's number in parsed values."""
    units = {"i": I, "e": E}
    return [
        value.subs({s: units[s.name] for s in value.free_symbols if s.name in units}).rewrite(cos)
        if isinstance(value, Basic) and not isinstance(value, Relational)
        else value
        for value in parsed
    ]


def _is_far(gold: list[Any], found: list[Any]) -> bool:
    """Return whether two numbers differ by much in relation to their size: 0 is not 6.6e-34.

    Only six decimals of them were compared by math-verify.
    """
    numbers = [
        N(value, DIGITS)
        for value in (*gold[:1], *found[:1])
        if isinstance(value, Expr)
        and not value.has(UnevaluatedExpr)  # of percents: 50% is also 50
        and value.is_number
    ]
    if len(numbers) < 2:
        return False
    a, b = numbers
    return bool(
        abs(a - b) > MAX_RELATIVE_ERROR * max(abs(a), abs(b)) and abs(a - b) > MIN_DIFFERENCE
    )


def _raise_cpu_limit(*_: Any) -> None:
    raise _CpuLimitExceeded


def _normalize_list(words: str) -> str:
    return re.sub(r",? and |, ?", ", ", words)


def _parse_measure(text: str) -> tuple[Fraction, str, Fraction] | None:
    r"""Return (number, kind, factor) of `12\text{ cm}`."""
    pattern = (
        r"(-?\d+(?:\.\d+)?)(?:\s|\\[,; ]|~)*" + latex.TEXT_COMMAND + r"\s*\{[\s~]*([A-Za-z]+)\s*\}"
    )
    match = re.fullmatch(pattern, text)
    unit = match and (UNITS.get(match[2]) or UNITS.get(match[2].lower().rstrip("s")))
    return (Fraction(match[1]), *unit) if match and unit else None
