"""Parser of a row's gold answer for rewards; InvalidGold has the reason why no answer can equal it.

The command line parses the golds of all rows before a job starts, the rewards each row's again.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from typing import Any

from meshrl.common.grading.row_values import get_value, has_value

DEFAULT_LETTERS = "ABCDEFGHIJ"  # letters of choices, unless the option `letters` names others
CHOICES_KEY = "choices"  # key of a row's choices
MAX_MATH_CHARS = 2_000  # characters of a mathematical gold
# B, (B), B., "B. Paris"
LABELLED_CHOICE = re.compile(r"\W*([A-Za-z])(?:\W*|[.):]\s*\S.*)", re.DOTALL)
INTEGER = re.compile(r"-?\d+(?:\.0+)?")
GSM8K_SOLUTION = re.compile(r"####\s*(\S[^\n]*)")  # GSM8K's answers end like this
# Texts that no answer in mathematics contains: they are rejected without parsing.
CODE_PATTERN = re.compile(r"__|\b(?:import|lambda|exec|eval|open|getattr)\b")
TEXT_FIX = "write the text of a correct answer"


class InvalidGold(ValueError):
    """Error of a gold answer that no answer can equal; `fix` is the remedy."""

    def __init__(self, message: str, fix: str = TEXT_FIX) -> None:
        super().__init__(message)
        self.fix = fix


def get_gold(row: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return the row's value under the key that the option `answer` names."""
    key = options.get("answer", "answer")
    if not has_value(row, key):
        raise InvalidGold(f"the row has no {key!r}", "set options.answer to the row's key")
    return get_value(row, key)


def parse_text_gold(row: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return the text that `exact` and `regex` compare with."""
    value = get_gold(row, options)
    if isinstance(value, float) and (value.is_integer() or "e" in repr(value)):
        raise InvalidGold(f"{value!r} is a number with a point, whose text is {str(value)!r}")
    return _to_text(value)


def _to_text(value: Any) -> str:
    if value is None:
        raise InvalidGold("it is null", "write the answer, or remove the row")
    if not isinstance(value, str | int | float):
        raise InvalidGold(f"it is a {type(value).__name__}, not a text: {value!r:.80}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidGold(f"it is {value}", "write the answer, or remove the row")
    text = str(value).strip()
    if not text:
        raise InvalidGold("it is empty", "write the answer, or remove the row")
    return text


# ---- mathematics ---------------------------------------------------------------------------------


def parse_math_gold(row: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return the gold of `math`: a text or a number; of a solution that ends with `#### 72`, 72."""
    value = get_gold(row, options)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = _to_text(value)
    if found := GSM8K_SOLUTION.findall(text):
        text = found[-1].strip()
    if len(text) > MAX_MATH_CHARS:
        raise InvalidGold(
            f"it has {len(text)} characters; the limit is {MAX_MATH_CHARS}",
            "write the answer alone",
        )
    if match := CODE_PATTERN.search(text):
        raise InvalidGold(f"it contains {match[0]!r}, which is not mathematics: {text!r:.80}")
    depth = 0
    for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            break
    if depth:
        raise InvalidGold(f"its braces do not match: {text!r:.80}", "close every brace")
    return text


# ---- choices -------------------------------------------------------------------------------------


def parse_choice_gold(row: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return the letter of the right choice, in upper case.

    A gold is a letter (`B`, `(b)`, `B. Paris`); or, in a row with `choices`, one of these: its
    text, its label, or its number, counted from 0.
    """
    value = get_gold(row, options)
    if isinstance(value, float) and value.is_integer():  # Arrow's form of a column with nulls
        value = int(value)
    if isinstance(value, bool):
        raise InvalidGold(f"it is {value}, not a letter", "write the letter, as in B")
    text, letters = _to_text(value), str(options.get("letters", DEFAULT_LETTERS)).upper()
    texts, labels = _read_choices(row)
    many = len(texts)
    if (place := _find_choice_index(text, texts, labels)) is not None:
        return _get_nth_letter(place, letters, text)
    if INTEGER.fullmatch(text):
        return _get_numbered_letter(text, isinstance(value, str), texts, letters)
    match = LABELLED_CHOICE.fullmatch(text)
    if match is None:
        known = "it is none of the row's choices" if many else "the row has no choices"
        raise InvalidGold(f"{text!r:.80} has no letter, and {known}", "write the letter, as in B")
    found = match[1].upper()
    if found not in letters or (many and letters.index(found) >= many):
        some = letters[:many] if many else letters
        raise InvalidGold(
            f"{text!r:.80} is none of the letters {some}", "write one of them, as in A"
        )
    return found


def _get_numbered_letter(text: str, is_text: bool, texts: list[str], letters: str) -> str:
    """Return the letter of a class label, or of the choice with this text."""
    label, many = int(float(text)), len(texts)
    same = [place for place, one in enumerate(texts) if is_text and one.strip() == text]
    if not many:
        raise InvalidGold(
            f"it is the number {label}, but the row has no {CHOICES_KEY!r}",
            "write the letter, as in B, or add a list of choices to the row",
        )
    counts = 0 <= label < many
    if len(same) == 1 and (not counts or label == same[0]):
        return _get_nth_letter(same[0], letters, text)
    if same or not counts:
        also = " and the text of another one" if same else ""
        what = f"{many} choices, numbered from 0 to {many - 1}{also}"
        raise InvalidGold(f"it is the number {label} of {what}", "write the letter, as in B")
    return _get_nth_letter(label, letters, text)


def _get_nth_letter(place: int, letters: str, text: str) -> str:
    if place < len(letters):
        return letters[place]
    few = f"there are {len(letters)} letters: {letters}"
    fix = "add letters to options.letters"
    raise InvalidGold(f"{text!r:.80} is choice {place + 1}, but {few}", fix)


def _read_choices(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the (texts, labels) of a row's choices, in the shapes of public datasets."""
    value = row.get(CHOICES_KEY)
    if isinstance(value, dict):
        texts, labels = value.get("text"), value.get("label")
        if isinstance(texts, list) and isinstance(labels, list):
            return [str(text) for text in texts], [str(label) for label in labels]
        return [str(text) for text in value.values()], [str(label) for label in value]
    if isinstance(value, list):
        if value and all(isinstance(one, dict) and "label" in one for one in value):
            return [str(one.get("text", "")) for one in value], [str(o["label"]) for o in value]
        return [str(one) for one in value], []
    return [], []


def _find_choice_index(text: str, texts: list[str], labels: list[str]) -> int | None:
    """Return the index of the choice with this label or, if there is one such, this text."""
    if text in labels:
        place = labels.index(text)
        alphabetical = labels == list(string.ascii_uppercase[: len(labels)])
        return place if alphabetical or len(text) > 1 or not text.isalpha() else None
    same = [i for i, one in enumerate(texts) if one.strip().casefold() == text.casefold()]
    single = len(text.strip(string.punctuation)) == 1 and text.strip(string.punctuation).isalpha()
    return same[0] if len(same) == 1 and not single and not INTEGER.fullmatch(text) else None
