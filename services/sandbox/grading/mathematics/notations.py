"""Mathematical notations whose meaning math-verify loses.

These are numbers with a base as index, scientific notation, and values by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# of two numbers in scientific notation: as six decimals of any other
MAX_RELATIVE_ERROR = Fraction(1, 10**6)
EXPONENT = 5_000  # largest power of ten that is computed
TIMES = r"(?:\\times|\\cdot|\*)"
POWER = r"10\s*\^\s*(?:\{\s*([+-]?\d{1,4})\s*\}|([+-]?\d{1,4}))"
SCIENTIFIC = re.compile(rf"([+-]?\d+(?:\.\d+)?|[+-]?\.\d+)(?:\s*{TIMES}\s*{POWER})?|([+-]?){POWER}")
MIXED = re.compile(r"(?<![\w.])(\d{1,9})[ ~]+(\d{1,9})/(\d{1,9})[\s.$*]*$")
ENDS_IN_POWER = re.compile(
    r"(?<![\w.^])([+-]?\d+(?:\.\d+)?)\s*(?:[x×·*]|\\times|\\cdot)\s*"
    r"10\s*\^\s*[{(]?\s*([+-]?\d{1,4})\s*[)}]?[\s.$*]*$"
)
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
BASES |= {"ten": 10, "twelve": 12, "sixteen": 16}
NUMBER_WITH_BASE = re.compile(
    r"(?<![\w\\.^{])([0-9][0-9A-F]*|[A-F][0-9A-F]+)\s*_\s*"
    r"(?:\{\s*(?:\\text\s*\{\s*)?(\d{1,2}|[a-z]+)\s*\}?\s*\}|(\d))(?![\w.])"
)
INVALID_NUMBER_TEXT = r"\text{no number of this base}"
NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?"
ASSIGNMENT = re.compile(rf"({NAME})\s*=\s*([^=]+)")
NAMES = re.compile(rf"(?:\\left)?\(\s*({NAME}(?:\s*,\s*{NAME})+)\s*(?:\\right)?\)\s*=\s*(.+)", re.S)
SEPARATORS = re.compile(r",(?!\d{3}(?!\d))|;|\\text\s*\{\s*,?\s*and\s*\}|\band\b|\\quad|\\qquad")
ROUND = re.compile(r"(?:\\left)?\((.*?)(?:\\right)?\)", re.S)

OR = re.compile(r"\\text\s*\{\s*,?\s*or\s*\}|,?\s*\bor\b|\\lor(?![a-z])|\\vee(?![a-z])")
INTERVAL = re.compile(r"(?:\\left)?[(\[][^()\[\]]+,[^()\[\]]+(?:\\right)?[)\]]")
COMPARISON_SIGN = re.compile(r"(<=|>=|<|>|\\(?:leq?|geq?|lt|gt)(?:slant)?(?![a-z]))")
VARIABLE = re.compile(r"[A-Za-z]|\\(?!infty)[a-z]+")


def parse_scientific(text: str) -> tuple[Fraction, bool] | None:
    """Return (number, whether it has a power of ten), or None if it is no plain number."""
    match = SCIENTIFIC.fullmatch(text.strip())
    if match is None:
        return None
    digits, *exponents = match[1], match[2] or match[3], match[5] or match[6]
    exponent = next((int(exponent) for exponent in exponents if exponent), 0)
    if abs(exponent) > EXPONENT:
        return None
    number = Fraction(digits) if digits else Fraction(f"{match[4]}1")
    return number * Fraction(10) ** exponent, any(exponents)


def replace_mixed_number(text: str, at_end: bool) -> str:
    """Replace a mixed number as 1 1/2 by one fraction.

    The text is the number, or with `at_end` ends with it.
    """
    text = text.strip()
    match = MIXED.search(text)
    before = text[: match.start()] if match else ""
    if match is None or not int(match[3]) or (before not in ("", "-") and not at_end):
        return text
    integer_part, over, under = map(int, match.groups())
    return f"{before}{integer_part * under + over}/{under}"


def extract_trailing_power(text: str) -> str:
    """Return the number with a power of ten that ends a text, as LaTeX; else the text."""
    match = ENDS_IN_POWER.search(text)
    return rf"{match[1]} \times 10^{{{match[2]}}}" if match else text


def to_interval_union(text: str) -> str:
    """Return "x<1 or x>3", or intervals with "or" between them, as a union of intervals.

    Other texts stay as they are.
    """
    parts = OR.split(text)
    found = [_to_interval(part.strip()) for part in parts]
    return r" \cup ".join(filter(None, found)) if len(parts) > 1 and all(found) else text


def _to_interval(text: str) -> str:
    """Return a relation of one variable, or an interval, as an interval; empty: neither."""
    text = text.strip("$ ")
    if INTERVAL.fullmatch(text):
        return text
    parts = COMPARISON_SIGN.split(text)
    signs = [sign in ("<", r"\lt") or sign in (">", r"\gt") for sign in parts[1::2]]  # open ends
    downward = [sign.startswith((">", r"\g")) for sign in parts[1::2]]
    values = [part.strip() for part in parts[::2]]
    if not all(values) or len(set(downward)) != 1:
        return ""
    if downward[0]:
        values, signs = values[::-1], signs[::-1]
    if len(values) == 3 and VARIABLE.fullmatch(values[1]):
        return f"{'(' if signs[0] else '['}{values[0]}, {values[2]}{')' if signs[1] else ']'}"
    if len(values) == 2 and VARIABLE.fullmatch(values[0]):
        return rf"(-\infty, {values[1]}{')' if signs[0] else ']'}"
    if len(values) == 2 and VARIABLE.fullmatch(values[1]):
        return rf"{'(' if signs[0] else '['}{values[0]}, \infty)"
    return ""


def is_close(a: Fraction, b: Fraction) -> bool:
    """Return whether two numbers differ by rounding only, relative to the larger."""
    return abs(a - b) <= MAX_RELATIVE_ERROR * max(abs(a), abs(b))


def to_base_ten(text: str) -> str:
    """Convert numbers of other bases in a text, as 101_2, to base ten."""
    return NUMBER_WITH_BASE.sub(_replace_base, text)


def _replace_base(match: re.Match[str]) -> str:
    base_text = match[2] or match[3]
    base = int(base_text) if base_text.isdigit() else BASES.get(base_text, 0)
    if not 2 <= base <= 36:
        return match[0]
    try:
        return str(int(match[1], base))
    except ValueError:
        return INVALID_NUMBER_TEXT


@dataclass(frozen=True)
class NamedValues:
    """Values by name, and in the order in which a tuple of them would be written."""

    values: dict[str, str]
    order: tuple[str, ...]


def parse_named_values(text: str) -> NamedValues | None:
    """Parse `x=1, y=2` or `(x,y)=(1,2)` with two names or more; None for any other text.

    A tuple has the values in alphabetical order, where names and values are separate.
    """
    if match := NAMES.fullmatch(text.strip()):
        names = [name.strip() for name in match[1].split(",")]
        values = parse_value_list(match[2])
        if values is None or len(values) != len(names) or len(set(names)) < len(names):
            return None
        return NamedValues(dict(zip(names, values, strict=True)), tuple(names))
    found = [ASSIGNMENT.fullmatch(part.strip()) for part in _split_top_level(text)]
    pairs = {match[1]: match[2] for match in found if match is not None}
    if len(found) < 2 or len(pairs) < len(found):
        return None
    return NamedValues(pairs, tuple(sorted(pairs)))


def parse_value_list(text: str) -> list[str] | None:
    """Return the values of a tuple, or of a list without brackets; None if some are no plain
    values.
    """
    text = text.strip()
    match = ROUND.fullmatch(text)
    if match is not None and len(_split_top_level(text)) == 1:
        text = match[1]
    values = [part.strip() for part in _split_top_level(text)]
    if len(values) < 2 or not all(values) or any(re.search(r"[=<>]", value) for value in values):
        return None
    return values


def _split_top_level(text: str) -> list[str]:
    """Split a text at separators outside of brackets."""
    depth, begin, parts = 0, 0, []
    ends = {match.start(): match.end() for match in SEPARATORS.finditer(text)}
    skipped = 0
    for at, character in enumerate(text):
        if at < skipped:
            continue
        if at in ends and depth == 0:
            parts.append(text[begin:at])
            begin = skipped = ends[at]
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
    return [*parts, text[begin:]]
