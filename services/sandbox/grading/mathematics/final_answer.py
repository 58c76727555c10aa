"""Final answer of a text, by its marks or its last sentence.

The section "Answers in mathematics" of docs/use/rewards.md has the rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshrl.services.sandbox.grading.mathematics import latex

MAX_TAIL_CHARACTERS = 20_000  # characters at the end of a text that are searched for statements
MAX_SENTENCE_CHARACTERS = 2_000  # longest sentence that is read
MAX_BOX_GAP = 200  # longest text between two boxes that are one answer
TAG = re.compile(
    r"<answer>((?:(?!<answer>).)*?)</answer>"
    r"|<\|begin_of_box\|>((?:(?!<\|begin_of_box\|>).)*?)<\|end_of_box\|>",
    re.DOTALL | re.IGNORECASE,
)
HASHES = re.compile(r"^[ \t]*####[ \t]*(?!#)(\S[^\n]*)", re.MULTILINE)
NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?"
NAMES = re.compile(rf"({NAME})\s*=\s*\$?\s*$")
BOX_SEPARATOR = re.compile(
    r"[\s$.]*(?:,|;|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\})?[\s$]*" rf"(?:{NAME}\s*=[\s$]*)?"
)

# ---- statements ----------------------------------------------------------------------------------

ANSWER_IS = re.compile(
    r"(?im:\banswer(?:\s+to\s+(?:the|this)\s+(?:question|problem))?\s*"
    r"(?:(?:is|are|was|would\s+be|must\s+be|should\s+be)\b\s*(?:therefore|thus|simply)?\s*[:=]?"
    r"|[:=]|\n)|^\s*A\s*:|\b(?:respuesta|réponse|antwort|ответ)\s*(?:est|es|ist)?\s*:?"
    r"|(?:答案|答え|정답|解答|(?<![一-龥])答)\s*(?:应该)?(?:是|为|為|は|은|는)?\s*[:=]?)"
    r"[\s*_`]*(?=(?P<said>[^\s*_`][^\n]*))"
)
IS_THE_ANSWER = re.compile(
    r"(?P<said>\$[^$\n]{1,200}\$|[^\s,;]{1,80})\s+is\s+(?:the|our|my)\s+(?:final\s+|correct\s+)*answer\b"
)
SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|;\s")
REASON = re.compile(r"\s*,?\s+(?i:because|since|as|where|which|so)\b(?!\s*\\)|\s*,\s+(?i:not)\s")
RETRACTION = re.compile(
    r"(?i)\b(?:wait|actually|correction|instead|rather|mistake|wrong|hold on|hmm)\b"
)
NEGATION = re.compile(r"(?i)^\W*(?:(?:not|never|neither|unknown|unclear)\b|不|并非)")
COMPARISON = re.compile(
    r"(?i)\b(?:than|at\s+(?:least|most)|between|above|below|up\s+to|exceeds?|in\s+the\s+range|from)\b(?!.*\bso\b)"
)

# ---- the last sentence ---------------------------------------------------------------------------

DISPLAY_MATH = re.compile(
    r"(?:\\\[((?:(?!\\\[).)*)\\\]|\$\$((?:(?!\$\$).)+)\$\$)[\s.]*\Z", re.DOTALL
)
POLITE = re.compile(
    r"(?i)\b(?:hope (?:this|it|that)|let me know|feel free|thank|happy to|good luck|questions)\b"
)
SUPPOSITION = re.compile(
    r"(?i)(?:^\W*(?:let|suppose|assume|say|if|consider|try|imagine|recall|first|next)\b"
    r"|\b(?:let['’]?s?|suppose|assume|guess|maybe|perhaps|might|could|whether)\b"
    r"|\b(?:to|must|should|will|us)\s+(?:find|solve|compute|calculate|determine|think|check|try)\b)"
    r"(?!.*\b(?:so|then)\b[^.]*=|.*\bso\b)"
)
DENIAL = re.compile(
    r"(?i)\b(?:not|never|cannot|neither|nor|wrong|incorrect|false|impossible|doubt)\b|n['’]t\b"
)
REFERENCE = re.compile(
    r"(?i)\b(?:problem|exercise|page|see|equation|figure|table|step|section|chapter|line|question"
    r"|example|theorem|case)\s*\(?\d[\d.]*\)?\W*$"
)
CLAIM = re.compile(
    r".*(?:\b(?i:is|are|be|equals?|gives?|get|of)\s|[:=])\s*(?P<value>\S.*)", re.DOTALL
)
CLAUSE = re.compile(r"[.,;!?\n]")
BREAK = re.compile(r"(?<=[.!?])\s+|\n+|;\s+")
VALUE_END = re.compile(r".*[\d$}\])%π∞]", re.DOTALL)
TAIL = re.compile(r"[A-Za-z°]?(?:[\s*_`\"'”’]+[A-Za-z°/-]+){0,6}[\s*_`\"'”’」』.!✓✔✅]*")
TAIL_EXCLUSION = re.compile(
    r"(?i)\b(?:then|we|i|but|have|has|is|are|was|let|think|need|because|if|which|when|until)\b"
)
MARKUP_WRAPPER = re.compile(
    r"(?:\*{1,3}|_{1,2}|`+|\$\$?|\"|“|'|‘|「|\\\(|\\\[)\s*(?P<inside>.*?)\s*"
    r"(?:\*{1,3}|_{1,2}|`+|\$\$?|\"|”|'|’|」|\\\)|\\\])",
    re.DOTALL,
)
MARKUP_CHARACTERS = " \t\n*_`✓✔✅"
PERCENTAGE = re.compile(r"-?[\d.,]+\s*%")
BRACKET_WRAPPER = re.compile(r"\(([^(),;]*)\)")
WORD = re.compile(  # a word, or a unit
    r"(?<![\\A-Za-z])[A-Za-z]{2,}|\d\s+[A-Za-z]$|[\u00c0-\u024f\u0400-\u04ff\u3040-\uffff]"
)


@dataclass(frozen=True)
class AnswerReading:
    """Possible reading of the final answer."""

    text: str
    is_bare_value: bool  # the answer alone, read as LaTeX; else words that end with it


def read_final_answer(text: str) -> list[AnswerReading]:
    """Return the readings of the final answer, of which any may be right; empty if there is none.

    The first of these that the text has counts: the last box, or the boxes at the end with only
    commas, "and" or "or" between them. Then the last tag, the last `####`, and the last "answer
    is". Finally the last sentence, if it claims a value.
    """
    if (boxed := _read_boxes(text)) is not None:
        return [AnswerReading(boxed, True)]
    text = text[-MAX_TAIL_CHARACTERS:]
    if found := TAG.findall(text):
        content = next((one for one in found[-1] if one), "").strip()
        return (
            read_final_answer(content)
            if "\n" in content or ANSWER_IS.search(content)
            else _read_sentence(content)
        )
    if found := HASHES.findall(text):
        return _read_sentence(found[-1])
    if (statement := _find_statement(text)) is not None:
        return _read_sentence(statement)
    return _read_last_sentence(text)


def _read_boxes(text: str) -> str | None:
    found = list(latex.find_boxes(text))
    if not found:
        return None
    run = [found[-1]]
    for box in reversed(found[:-1]):
        between = text[box[1] : run[0][0]]
        if len(between) > MAX_BOX_GAP or not BOX_SEPARATOR.fullmatch(between):
            break
        run.insert(0, box)
    names = [NAMES.search(text[max(0, start - 80) : start]) for start, _, _ in run]
    if len(run) > 1 and all(names):
        contents = [
            f"{name[1]}={box[2].strip()}" for name, box in zip(names, run, strict=True) if name
        ]
    elif any(names[1:]):  # of another quantity
        contents = [run[-1][2].strip()]
    else:
        contents = [content.strip() for _, _, content in run]
    return ", ".join(dict.fromkeys(contents))


def _find_statement(text: str) -> str | None:
    """Return the answer that the last statement names; None: there is none, or it is retracted."""
    last = None
    for pattern in (ANSWER_IS, IS_THE_ANSWER):
        for match in pattern.finditer(text):
            clause = CLAUSE.split(text[max(0, match.start() - 200) : match.start()])[-1]
            if SUPPOSITION.search(clause) or DENIAL.search(clause):
                continue
            if last is None or match.start("said") > last.start("said"):
                last = match
    if last is None or RETRACTION.search(text, last.end("said")):
        return None
    statement = last["said"]
    if end := SENTENCE_END.search(statement):
        if RETRACTION.search(statement, end.end()):
            return None
        statement = "" if end[0] == "?" else statement[: end.start()]
    if reason := REASON.search(statement):
        statement = statement[: reason.start()]
    return "" if NEGATION.search(statement) or COMPARISON.search(statement) else statement


def _read_last_sentence(text: str) -> list[AnswerReading]:
    if match := DISPLAY_MATH.search(text):
        inside = (match[1] or match[2]).strip()
        return [AnswerReading(f"${inside}$", False), AnswerReading(inside, True)]
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip("`~ ") and not POLITE.search(line)]
    if not lines:
        return []
    sentences = [one for one in BREAK.split(lines[-1]) if one.strip(" *_`")]
    return _read_sentence(sentences[-1]) if sentences else []


def _read_sentence(sentence: str) -> list[AnswerReading]:
    """Return the readings of a sentence or marked answer; empty for a question or assumption."""
    sentence = sentence.strip()
    if len(sentence) > MAX_SENTENCE_CHARACTERS or sentence.rstrip(MARKUP_CHARACTERS).endswith("?"):
        return []
    if (
        _has_words(strip_markup(sentence))
        and re.search(r"[\d\\$]", sentence)
        and not _is_claim(sentence)
    ):
        return []
    return _read_fragment(sentence)


def _is_claim(sentence: str) -> bool:
    """Return whether a sentence claims a value: it ends with one, and at most six words."""
    value = VALUE_END.match(sentence)
    tail = sentence[value.end() :] if value else ""
    if value is None or not TAIL.fullmatch(tail) or TAIL_EXCLUSION.search(tail):
        return False
    return not any(p.search(sentence) for p in (SUPPOSITION, DENIAL, COMPARISON, REFERENCE))


def _read_fragment(fragment: str) -> list[AnswerReading]:
    """Return the readings of a fragment: alone, or with its words if it has any."""
    fragment = fragment.strip()
    if not fragment:
        return []
    bare = strip_markup(fragment)
    if not _has_words(bare):
        return [
            AnswerReading(bare, True),
            *([AnswerReading(bare, False)] if PERCENTAGE.fullmatch(bare) else []),
        ]
    ways = (
        [AnswerReading(fragment, False)]
        if bare == fragment
        else [AnswerReading(fragment, False), AnswerReading(bare, False)]
    )
    claimed = CLAIM.fullmatch(bare)
    several = claimed and re.search(r"\b(?:or|and)\b", bare[: claimed.start("value")])
    if claimed and not several and not _has_words(value := strip_markup(claimed["value"])):
        ways.append(AnswerReading(value, True))
    return ways


def _has_words(text: str) -> bool:
    text = re.sub(latex.TEXT_COMMAND + r"\s*\{[^{}]*\}|\b(?:and|or)\b", "", text)
    return bool(WORD.search(text))


def strip_markup(text: str) -> str:
    """Return the text without the markup, quotes and brackets around all of it."""
    before = None
    while text != before:
        before = text
        text = text.strip(MARKUP_CHARACTERS).rstrip(".!").strip(MARKUP_CHARACTERS)
        for pattern in (MARKUP_WRAPPER, BRACKET_WRAPPER):
            if (match := pattern.fullmatch(text)) and match[1].strip():
                text = match[1]
    return text
