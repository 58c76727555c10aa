r"""Parser of the choice that an answer names by its letter, also used for gold answers.

An answer names a choice in a mark (`\boxed{B}`, `<answer>B</answer>`), in a statement ("The answer
is B", "B is correct", "so it is (B)"), or as a line of its own at its beginning or end ("B", "B.
Paris"). The last of these counts. A letter elsewhere, and a mark or statement that names several,
is no choice. docs/use/rewards.md, "Answers with a letter", documents the rule.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

MAX_ANSWER_CHARS = 20_000  # characters that are read at the end of an answer
BOXED_ANSWER = re.compile(
    r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
    r"|<(?:final_)?answer>(.*?)</(?:final_)?answer>"
    r"|<\|begin_of_box\|>(.*?)<\|end_of_box\|>",
    re.DOTALL | re.IGNORECASE,
)

# ---- spelling ------------------------------------------------------------------------------------

STRIKETHROUGH = re.compile(r"~~[^~\n]{1,200}~~")
LATEX_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox)\s*\{([^{}]*)\}"
)
# A letter in bold, quotes, backticks, dollars or brackets is not a word.
DELIMITED_LETTER = re.compile(
    r"(?:\*{1,3}|_{1,2}|`|\$|[\"'“‘«「『【\[<(]|\\\(|\\\[|<(?!(?:final_)?answer)\w{1,12}>)\s*\(?([A-Za-z])[).:,]{0,2}\s*"
    r"(?:\*{1,3}|_{1,2}|`|\$|[\"'”’»」』】\]>)]|\\\)|\\\]|</(?!(?:final_)?answer)\w{1,12}>)(?![A-Za-z])"
)
MARKUP = re.compile(r"\*|__|`|\$|[\"“”«»「」『』【】]|\\[()\[\]]|(?<!\w)['‘]|['’](?!\w)")


def _strip_markup(text: str) -> str:
    """Return the text without markup, with (B) for each letter that is set apart."""
    text = STRIKETHROUGH.sub("", text)
    for _ in range(2):  # a command may be nested in another one
        text = LATEX_TEXT_COMMAND.sub(r"\1", text)
    for _ in range(3):  # quotes may be nested in bold
        text = DELIMITED_LETTER.sub(r"(\1)", text)
    return MARKUP.sub("", text).strip()


# ---- statements ----------------------------------------------------------------------------------

LETTER = r"(?:\((?P<apart>[A-Za-z])\)|(?<![A-Za-z0-9'’\\])(?P<bare>[A-Za-z])(?![A-Za-z0-9'’_^]))"
CHOICE_NOUN = (
    r"(?:(?:(?:the|la|el|a|die)\s+)?(?:answer\s+choice|option|choice|letter|answer|alternative"
    r"|opción|opção|вариант)\s*)?"
)
COPULA = (
    r"(?:is|was|would\s+have\s+to\s+be|should\s+be|would\s+be|must\s+be|has\s+to\s+be|will\s+be|es|est|ist|è|é|sería)"
    r"(?:\s+(?:therefore|thus|clearly|definitely|indeed|most\s+likely|probably|simply))?"
)
ANSWER_NOUN = (
    r"(?:answer|respuesta|réponse|antwort|risposta|resposta|odpowiedź|ответ|lösung"
    r"|(?:correct|right|best|final|chosen|my|the)\s+(?:option|choice|alternative|response|statement|letter|one)"
    r"|(?:option|choice|statement)\s+(?:that|which)\s[^.,;:?!\n]{1,60}?)"
    r"(?:\s+(?:to|for)\s+(?:this|the)\s+question|\s+here|\s+(?:correcta|correcte|corretta|correta)"
    r"|,[^,.\n]{1,30},)?"
)
ANSWER_IS_LETTER = re.compile(
    rf"(?i:(?<![A-Za-z]){ANSWER_NOUN}(?:\s+choice)?\s*(?:{COPULA}\s*[:=]?|[:=]|[-–—]>?|\n)\s*"
    rf"(?P<several>(?:either|both|one\s+of)\s+)?{CHOICE_NOUN}){LETTER}"
)
LABELLED_LETTER = re.compile(
    r"(?im:^\W*(?:final|choice|option|letter|selected(?:\s+(?:option|choice|answer))?|solution|ans\.?"
    rf"|result|conclusion|correct|verdict|pick)(?:\s*[:=]|\s+is\b|\.)\s*{CHOICE_NOUN}){LETTER}"
)
LETTER_IS_CORRECT = re.compile(
    rf"{LETTER}(?i:\s*(?:is|must\s+be|would\s+be|(?:seems|appears)(?:\s+to\s+be)?|['’]s)\s+(?:clearly\s+|indeed\s+)?(?:the\s+)?"
    r"(?:(?:most(?:\s+likely)?|only|single|one|my)\s+)?(?:correct|right|best|true|answer|accurate|appropriate)\b)"
)
CHOOSE_LETTER = re.compile(
    r"(?i:\b(?:choose|chose|pick|picked|select|selected|go(?:ing)?\s+with|went\s+with|opt\s+for"
    rf"|answer|guess(?:\s+is)?|say|think(?:\s+it(?:\s+is|['’]s))?|believe)\s+{CHOICE_NOUN}){LETTER}"
)
CONCLUSION_LETTER = re.compile(
    r"(?i:(?:\b(?:so|corresponds\s+to|matches|is\s+(?:option|choice)|i\.e\.|namely|probably|definitely"
    r"|thus|therefore|hence|consequently|(?:it|that|this)(?:\s+is|['’]s)|must\s+be"
    r"|has\s+to\s+be|leaves(?:\s+us\s+with)?|makes\s+it|no|wait|actually|rather|conclusion)"
    rf"|→|=>|⇒|∴|####)[\s,:]*(?:(?:it\s+is|it['’]s|it\s+must\s+be|must\s+be|is)\s+)?{CHOICE_NOUN})"
    rf"{LETTER}(?=\s*[.!)]*\s*(?:\n|$))"
)
EAST_ASIAN_ANSWER_IS_LETTER = re.compile(
    r"(?:答案|正确答案|正確答案|正确的?(?:答案|选项)|正確的?(?:答案|選項)|正解|答え|解答|故选|故選|应选|應選|选择|選擇|选|選|選び|정답|답)"
    rf"\s*(?:应该)?(?:是|为|為|は|が|은|는|이)?\s*[:：]?\s*(?:选项|選項|选|選)?\s*{LETTER}"
)
EAST_ASIAN_LETTER_IS_CORRECT = re.compile(
    rf"{LETTER}\s*(?:选项|選項)?\s*(?:是|为|為)?\s*(?:唯一)?正[确確]"
)
STATEMENT_PATTERNS = (
    ANSWER_IS_LETTER,
    LABELLED_LETTER,
    LETTER_IS_CORRECT,
    CHOOSE_LETTER,
    CONCLUSION_LETTER,
)

# Words that invalidate a statement if they precede it in its clause, or follow a letter.
NEGATION = re.compile(
    r"(?i:\b(?:not|never|neither|nor|cannot|if|whether|suppose|supposing|assume|assuming|unless|"
    r"wrong|incorrect|false|except|(?<!no )doubt|students|people|others|many)\b"
    r"|n['’]t\b)|不是|并非|不选|不選|不$|ではな"
)
CLAUSE_END = re.compile(r"[.,;:!?\n。，；！？]")
RETRACTION_AFTER_LETTER = re.compile(
    r"\s*\?|(?i:,?\s+which\s+is\s+(?:wrong|incorrect|false|not\s+(?:right|correct))\b)|(?i:[).:]?\s+(?:is|was|are|can|does|did|would|seems|looks|could|might|may)(?:n['’]t|not)?\b)"
    r"(?!(?i:\s+(?:clearly\s+|indeed\s+)?(?:the\s+)?(?:correct|right|best|true|answer|because)\b))"
)
BARE_LETTER_END = re.compile(
    r"\s*(?:$|[.,;:!)\]}\n…。，；：、—–]|-\s|=(?!=)|\\)"
    r"|(?i:\s+(?:because|since|as|for|due|which|with|and|or|is|by|that)\b)|\s*[^\x00-\x7f]|\s*[<(&/|]"
)
FURTHER_LETTER_AFTER = re.compile(
    r"\s*(?:,\s*(?:and|or)\b|,|/|&|、|\+|;|\b(?:and|or|y|o|und|oder|et|ou|e)\b|和|或|与|與|及)\s*"
    r"(?:\([A-Za-z]\)|[A-Z](?![A-Za-z0-9'’]))(?!\s+[a-z])"
)


PRONOUN_I_AFTER = re.compile(r",\s+(?!because|since)[a-z]")  # "I, too, am unsure"
FURTHER_LETTER_BEFORE = re.compile(r"(?:\([A-Za-z]\)|\b[A-Z])\s*(?:and|or|/|&|,)\s*$")


@dataclass(frozen=True)
class NamedChoice:
    """Text range that names a choice; without a letter it names several, or none of them."""

    position: int
    letter: str


def find_choice(answer: str) -> str:
    """Return the letter, in upper case, of the choice that an answer names; empty if none."""
    given = unicodedata.normalize("NFKC", answer[-MAX_ANSWER_CHARS:]).strip()
    text = _strip_markup(given)
    boxes = (
        NamedChoice(
            match.end(), find_choice(next(group for group in match.groups() if group is not None))
        )
        for match in BOXED_ANSWER.finditer(text)
    )
    found = sorted(
        [*boxes, *_find_statements(text), *_find_choice_lines(text)], key=lambda one: one.position
    )
    return found[-1].letter if found else _find_closing_letter(given)


def _find_statements(text: str) -> Iterator[NamedChoice]:
    for pattern in STATEMENT_PATTERNS:
        for match in pattern.finditer(text):
            if (
                letter := _get_statement_letter(text, match, pattern is LETTER_IS_CORRECT)
            ) is not None:
                yield NamedChoice(match.end(), letter)
    for pattern in (EAST_ASIAN_ANSWER_IS_LETTER, EAST_ASIAN_LETTER_IS_CORRECT):
        for match in pattern.finditer(text):
            if not _is_negated(text, match.start()):
                yield NamedChoice(match.end(), _get_single_letter(text, match))


def _get_statement_letter(text: str, match: re.Match[str], letter_comes_first: bool) -> str | None:
    """Return the letter of a statement, empty for several letters; None: it states nothing.

    `letter_comes_first`: the statement continues behind the letter, as in "B is correct".
    """
    if _is_negated(text, match.start()):
        return None
    if match.groupdict().get("several"):
        return ""
    if letter_comes_first:
        if match["bare"] in ("a", "i"):
            return None
        several = FURTHER_LETTER_BEFORE.search(text[max(0, match.start() - 20) : match.start()])
        return "" if several else _get_letter(match)
    if RETRACTION_AFTER_LETTER.match(text, match.end()):
        return None
    if match["bare"] and not BARE_LETTER_END.match(text, match.end()):
        return None
    if match["bare"] in ("I", "i") and PRONOUN_I_AFTER.match(text, match.end()):
        return None
    if match["bare"] in ("a", "i") and match.re in (
        CHOOSE_LETTER,
        CONCLUSION_LETTER,
    ):  # an article, a pronoun
        return None
    return _get_single_letter(text, match)


def _get_single_letter(text: str, match: re.Match[str]) -> str:
    return "" if FURTHER_LETTER_AFTER.match(text, match.end()) else _get_letter(match)


def _get_letter(match: re.Match[str]) -> str:
    return str(match["apart"] or match["bare"]).upper()


def _is_negated(text: str, start: int) -> bool:
    """Return True if the clause before a statement negates it."""
    clause = CLAUSE_END.split(text[max(0, start - 200) : start])[-1]
    return bool(NEGATION.search(clause))


# ---- lines ---------------------------------------------------------------------------------------

LINE_PREFIX = re.compile(r"\s*(?:[#>*•\-]+\s*)*")
LETTER_LINE = re.compile(rf"(?i:{CHOICE_NOUN}){LETTER}[.):!]*\s*")
LETTER_AND_TEXT_LINE = re.compile(
    rf"(?i:{CHOICE_NOUN}){LETTER}(?:(?<=\))[.:]?|[.):]|(?=\t))\s*\S.*"
)
LETTER_AND_REASON_LINE = re.compile(
    LETTER + r"(?:,\s*(?:because|since|as|which|not)\b|\s*[-–—]\s+\w\w|\s+(?:because|since)\b).*"
)
QUESTION_LABEL = re.compile(r"(?m)^\s*Q\s*[:.)]")  # then "A:" is short for the answer
CLOSING_LETTER = re.compile(
    r"(\w+)[\s,]*\(\s*(?:(?:option|choice|answer)\s+)?\**([A-Za-z])\**\s*\)[\s*.!]*$"
)
_REFERENCE_NOUN_LIST = (
    "figure fig equation eq case step part type table plan group section point line see also"
)
REFERENCE_NOUNS = frozenset(_REFERENCE_NOUN_LIST.split())  # a following (B) belongs to them
EXCLUSION = re.compile(r"(?i)\b(?:out|eliminat\w+|exclud\w+|reject\w*|unlike|than|without)\b")
SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n+")


def _find_choice_lines(text: str) -> Iterator[NamedChoice]:
    """Yield the first and the last line where they name a choice.

    A list of all choices names none of them.
    """
    lines, at = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            lines.append((at, line[LINE_PREFIX.match(line).end() :].strip()))  # type: ignore[union-attr]
        at += len(line)
    labelled = [m for _, line in lines if (m := LETTER_AND_TEXT_LINE.fullmatch(line))]
    one_choice = len({_get_letter(match) for match in labelled}) == 1 and not QUESTION_LABEL.search(
        text
    )
    for place in dict.fromkeys((0, len(lines) - 1)) if lines else ():
        at, line = lines[place]
        if match := LETTER_LINE.fullmatch(line):
            yield NamedChoice(at, _get_letter(match))
        elif match := LETTER_AND_REASON_LINE.fullmatch(line):
            yield NamedChoice(at, "" if _is_about_choice(line, match) else _get_letter(match))
        elif (
            one_choice
            and (match := LETTER_AND_TEXT_LINE.fullmatch(line))
            and not _is_about_choice(line, match)
        ):
            yield NamedChoice(at, _get_letter(match))


def _is_about_choice(line: str, match: re.Match[str]) -> bool:
    """Return True if a line with a label describes the choice instead of naming it."""
    end = match.end("apart") + 1 if match["apart"] else match.end("bare")
    return bool(RETRACTION_AFTER_LETTER.match(line, end) or FURTHER_LETTER_AFTER.match(line, end))


def _find_closing_letter(text: str) -> str:
    """Return the only letter in brackets of a last sentence that ends with it: "Paris (B)."."""
    sentence = SENTENCE_END.split(text)[-1]
    match = CLOSING_LETTER.search(sentence[-100:])
    found = re.findall(r"\(\W*(?:\w{6}\s+)?([A-Za-z])\W*\)", sentence)
    letters = set(map(str.upper, found))
    if match is None or len(letters) != 1 or match[1].lower() in REFERENCE_NOUNS:
        return ""
    return "" if NEGATION.search(sentence) or EXCLUSION.search(sentence) else letters.pop()
