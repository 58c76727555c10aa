"""Conversion of mathematical characters and East Asian words to ASCII and LaTeX.

These are full-width forms (NFKC), superscripts, fractions, punctuation, counters, units and
connectives.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ", "0123456789+-()ni", strict=True))
SUPERSCRIPT_RUN = re.compile(f"[{''.join(SUPERSCRIPTS)}]+")
SUBSCRIPT_RUN = re.compile(f"[{''.join(SUBSCRIPTS)}]+")
FRACTIONS = re.compile("[¼½¾⅐-⅞]")
SIGNS = str.maketrans(
    {"｛": r"\{", "｝": r"\}", "〈": "(", "〉": ")", "⟨": "(", "⟩": ")"}
    | {"、": ", ", "。": ". ", "∶": ":", "＄": "", "￥": "", "¥": ""}
    | {sign: rf"\mathbb{{{name}}}" for sign, name in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
)
BEHIND_MATH, BEFORE_MATH = r"(?<=[0-9A-Za-z)\]}$])\s*", r"\s*(?=[0-9A-Za-z\\(\[{$+-])"


def _word_pattern(word: str) -> str:
    """Return a pattern of a word, which LaTeX may set as text."""
    return rf"(?:\\text\s*\{{\s*(?:{word})\s*\}}|(?:{word}))"


CONNECTIVES = (
    (re.compile(BEHIND_MATH + _word_pattern("以及|和|与|與|及|と") + BEFORE_MATH), " and "),
    (re.compile(BEHIND_MATH + _word_pattern("或者|或是|或|または") + BEFORE_MATH), r"\\text{ or }"),
)
UNITS = {"毫米": "mm", "厘米": "cm", "千米": "km", "公里": "km", "米": "m"}
UNITS |= {"千克": "kg", "公斤": "kg", "克": "g"}
UNITS |= {"秒": "second", "分钟": "minute", "小时": "hour", "天": "day", "周": "week"}
BEHIND_NUMBER, NO_WORD = r"(?<=[0-9}])\s*", r"(?![\u3040-\u9fff])"
UNIT = re.compile(BEHIND_NUMBER + _word_pattern("|".join(UNITS)) + NO_WORD)
DEGREES = re.compile(BEHIND_NUMBER + _word_pattern("度") + NO_WORD)
PARTS_OF_PATTERN = re.compile(r"(\d+)\s*分之\s*(\d+)")
MYRIADS = {"万": 10**4, "萬": 10**4, "만": 10**4, "亿": 10**8, "億": 10**8}
MYRIAD = re.compile(rf"(?<![\d.])(\d{{1,12}}(?:\.\d{{1,12}})?)\s*([{''.join(MYRIADS)}])(?!\d)")
# Counters behind a number; not those that change it, as in 72点5, 3个半 and 3千.
COUNTER = re.compile(
    BEHIND_NUMBER
    + _word_pattern(
        r"(?:(?![万萬亿億千百十分点點半负負零一二三四五六七八九])"
        r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]){1,8}"
    )
    + r"(?=\s*(?:[.,;:!)}$\n]|$))"
)
BEFORE_NUMBER = re.compile(r"(?<=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af])(?=[\d\\$-])")
TOTAL_WORD = re.compile(r"(?<=[{$])\s*(?:一共|总共|共|等于|为|是)\s*(?=[\d\\-])")  # 共72
IN_BRACKETS = re.compile(BEHIND_NUMBER + r"\([\u4e00-\u9fff]{1,4}\)")  # 72(元)
EAST_ASIAN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")


def to_ascii_latex(text: str) -> str:
    """Return the text in ASCII and LaTeX, as far as these characters have a meaning there."""
    if text.isascii():
        return text
    text = FRACTIONS.sub(_replace_fraction, text)
    text = SUPERSCRIPT_RUN.sub(
        lambda m: "^{" + "".join(map(SUPERSCRIPTS.__getitem__, m[0])) + "}", text
    )
    text = SUBSCRIPT_RUN.sub(
        lambda m: "_{" + "".join(map(SUBSCRIPTS.__getitem__, m[0])) + "}", text
    )
    text = unicodedata.normalize("NFKC", text.translate(SIGNS))
    if not EAST_ASIAN.search(text):
        return text
    for pattern, word in CONNECTIVES:
        text = pattern.sub(word, text)
    text = PARTS_OF_PATTERN.sub(r"\\frac{\2}{\1}", text)
    text = MYRIAD.sub(_replace_myriad, text)
    text = UNIT.sub(_replace_unit, text)
    text = IN_BRACKETS.sub("", TOTAL_WORD.sub("", text))
    text = COUNTER.sub("", DEGREES.sub(r"^\\circ", text))
    return BEFORE_NUMBER.sub(" ", text)


def _replace_fraction(match: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", match[0]).split("\N{FRACTION SLASH}")
    return rf"\frac{{{over}}}{{{under}}}"


def _replace_unit(match: re.Match[str]) -> str:
    word = max((unit for unit in UNITS if unit in match[0]), key=len)
    return rf"\text{{ {UNITS[word]}}}"


def _replace_myriad(match: re.Match[str]) -> str:
    number = Fraction(match[1]) * MYRIADS[match[2]]
    return str(number.numerator) if number.denominator == 1 else match[0]
