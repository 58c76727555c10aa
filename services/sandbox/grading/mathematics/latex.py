"""Rewriting of LaTeX spellings that math-verify does not read; finds boxes, words and letters."""

from __future__ import annotations

import re
from collections.abc import Iterator

TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)"
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|(\d))")
SIGNS = {"−": "-", "–": "-", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ", "×": r"\times "}
SIGNS |= {"·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "€": "", "£": ""}
SIGNS |= {"{:}": ":", "{.}": ".", r"\lbrace": r"\{", r"\rbrace": r"\}"}
SIGNS |= {r"\varnothing": r"\emptyset", r"\left\langle": "(", r"\right\rangle": ")"}
SIGNS |= {r"\langle": "(", r"\rangle": ")", "**": "^"}
SPELLINGS = [
    (re.compile(r"\^\{\s*\\degrees?\s*\}|\^?\\degrees?(?![a-z])"), r"^\\circ"),
    (re.compile(r"~"), " "),
    (re.compile(r"(?<![\w)}\]])\+\s*(?=\\infty)"), ""),
    (re.compile(r"(?<=[1-9])(\d{0,2})\{,\}(?=\d{3}(?!\d))"), r"\1,"),  # 1{,}000
    (re.compile(r"(?<=,\d{3})\{,\}(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # 0{,}5
    (re.compile(r"√\s*(\d+|[a-z]|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:underline|color\{[a-z]+\}|textcolor\{[a-z]+\})\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<=\d)(?:\\[,; ]|(?<=\d) |~)(?=\d{3}(?!\d))"), ""),  # 5\,000
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)"), r"\1 \\times 10^{\2}"),  # 3e8
    (re.compile(r"(?<=\d)\s+x\s+(?=10\s*\^)"), r" \\times "),
    (
        re.compile(
            r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?\s*(\d+(?:\.\d+)?)\s*"
            r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*[)}]?"
        ),
        r"\1{\\frac{\2\\pi}{180}}",
    ),
    (re.compile(TEXT_COMMAND + r"\{\s*(-?[\d.,]+)\s*[A-Za-z/^0-9 ]*\}$"), r"\1"),  # \text{12 cm}
    (re.compile(r"\\log_\{?e\}?"), r"\\ln"),
    (re.compile(r"\\lg(?![a-z])"), r"\\log_{10}"),
    (re.compile(r"\\(?:mathrm|text)\{([ei])\}"), r"\1"),
]
MIXED_PERCENT = re.compile(r"(?<![\d.])(\d+)\s*\\[dt]?frac\{(\d+)\}\{(\d+)\}\s*\\?%")
REPEATING_DECIMAL = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?")
LETTER = re.compile(r"\(?([A-Ja-j])\)?\**")
LABELLED_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])[.):])\s*(?!.*\b(?:or|and)\b)[^,;]*")
CHOICE_STATEMENT = re.compile(
    r"(?i:\b(?:answer|option|choice)\b)(?:\s+is)?\s*:?\s*\**\(?([A-J])\)?\**\.?\s*$"
)


def find_boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, content) of outermost boxes whose braces balance."""
    ends = _match_braces(text)
    at = 0
    for match in BOX.finditer(text):
        if match.start() < at:
            continue
        end = match.end() if match[2] else ends.get(match.end() - 1, 0)
        if end:
            content = match[2] or text[match.end() : end - 1]
            yield match.start(), end, content
            at = end


def _match_braces(text: str) -> dict[int, int]:
    """Map the position of each opening brace to that of its closing one, in one pass."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    escaped = False
    for at, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            opened.append(at)
        elif character == "}" and opened:
            ends[opened.pop()] = at + 1
    return ends


def normalize(text: str) -> str:
    """Rewrite a text in spellings that math-verify reads."""
    text = re.sub(r"^\s*&?\s*(?:=|\\approx|\\sim)\s*", "", text.strip())
    inner = list(find_boxes(text))
    if len(inner) == 1 and inner[0][:2] == (0, len(text)):
        return normalize(inner[0][2])
    for sign, spelling in SIGNS.items():
        text = text.replace(sign, spelling)
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    text = MIXED_PERCENT.sub(_replace_mixed_percent, text)
    text = REPEATING_DECIMAL.sub(_replace_repeating_decimal, text)
    return text if text.endswith("\\ ") else text.rstrip(". ")


def _replace_mixed_percent(match: re.Match[str]) -> str:
    integer_part, over, under = int(match[1]), int(match[2]), int(match[3])
    return rf"\frac{{{integer_part * under + over}}}{{{under}}}\%"


def _replace_repeating_decimal(match: re.Match[str]) -> str:
    integer_part, head, tail = match[1] or "0", match[2], match[3]
    over = int(integer_part + head + tail) - int(integer_part + head)
    return rf"\frac{{{over}}}{{{(10 ** len(tail) - 1) * 10 ** len(head)}}}"


def strip_text_commands(text: str) -> str:
    """Return the text without the commands that set words."""
    return re.sub(TEXT_COMMAND + r"\s*\{([^{}]*)\}", r"\1", text)


def normalize_words(text: str) -> str | None:
    """Return the text in lower case if it has only words; else None."""
    text = re.sub(r"\s+", " ", strip_text_commands(text)).strip(" .*$()").lower()
    return text if re.fullmatch(r"[a-z][a-z ,'-]*", text) else None


def find_choice(text: str, is_bare_value: bool) -> str:
    """Return the choice in `B`, `(B)`, `B. 12`, `The answer is C.`; empty: none."""
    text = strip_text_commands(text).strip(" $*")
    match = LETTER.fullmatch(text.rstrip(".")) or LABELLED_CHOICE.fullmatch(text)
    if match is None and not is_bare_value:
        match = CHOICE_STATEMENT.search(text)
    return next((g.upper() for g in match.groups() if g), "") if match else ""
