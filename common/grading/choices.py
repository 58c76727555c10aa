"""Reads which choice an answer names by its letter, and the letter of a row's gold answer.

An answer names a choice in a mark (`\\boxed{B}`, `<answer>B</answer>`), in a statement ("The answer
is B", "B is correct", "so it is (B)"), or as a line of its own at its beginning or end ("B",
"B. Paris"). The last of these counts. A letter elsewhere, and a mark or statement that names
several, is no choice. docs/sandbox.md, "Answers with a letter", documents the rule.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST = 20_000  # characters of an answer that are read: its end
BOX = re.compile(
    r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
    r"|<(?:final_)?answer>(.*?)</(?:final_)?answer>"
    r"|<\|begin_of_box\|>(.*?)<\|end_of_box\|>",
    re.DOTALL | re.IGNORECASE,
)

# ---- spelling ------------------------------------------------------------------------------------

STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
COMMANDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox)\s*\{([^{}]*)\}")
# A letter in bold, quotes, backticks, dollars or brackets is no word.
SET_APART = re.compile(
    r"(?:\*{1,3}|_{1,2}|`|\$|[\"'“‘«「『【\[<(]|\\\(|\\\[|<(?!(?:final_)?answer)\w{1,12}>)\s*\(?([A-Za-z])[).:,]{0,2}\s*"
    r"(?:\*{1,3}|_{1,2}|`|\$|[\"'”’»」』】\]>)]|\\\)|\\\]|</(?!(?:final_)?answer)\w{1,12}>)(?![A-Za-z])"
)
MARKUP = re.compile(r"\*|__|`|\$|[\"“”«»「」『』【】]|\\[()\[\]]|(?<!\w)['‘]|['’](?!\w)")


def _plain(text: str) -> str:
    """Return the text without markup, with (B) for each letter that is set apart."""
    text = STRUCK.sub("", text)
    for _ in range(2):  # a command may stand in another one
        text = COMMANDS.sub(r"\1", text)
    for _ in range(3):  # as may quotes in bold
        text = SET_APART.sub(r"(\1)", text)
    return MARKUP.sub("", text).strip()


# ---- statements ----------------------------------------------------------------------------------

LETTER = r"(?:\((?P<apart>[A-Za-z])\)|(?<![A-Za-z0-9'’\\])(?P<bare>[A-Za-z])(?![A-Za-z0-9'’_^]))"
KIND = (
    r"(?:(?:(?:the|la|el|a|die)\s+)?(?:answer\s+choice|option|choice|letter|answer|alternative"
    r"|opción|opção|вариант)\s*)?"
)
BE = (
    r"(?:is|was|would\s+have\s+to\s+be|should\s+be|would\s+be|must\s+be|has\s+to\s+be|will\s+be|es|est|ist|è|é|sería)"
    r"(?:\s+(?:therefore|thus|clearly|definitely|indeed|most\s+likely|probably|simply))?"
)
ANSWER = (
    r"(?:answer|respuesta|réponse|antwort|risposta|resposta|odpowiedź|ответ|lösung"
    r"|(?:correct|right|best|final|chosen|my|the)\s+(?:option|choice|alternative|response|statement|letter|one)"
    r"|(?:option|choice|statement)\s+(?:that|which)\s[^.,;:?!\n]{1,60}?)"
    r"(?:\s+(?:to|for)\s+(?:this|the)\s+question|\s+here|\s+(?:correcta|correcte|corretta|correta)"
    r"|,[^,.\n]{1,30},)?"
)
SAID = re.compile(
    rf"(?i:(?<![A-Za-z]){ANSWER}(?:\s+choice)?\s*(?:{BE}\s*[:=]?|[:=]|[-–—]>?|\n)\s*"
    rf"(?P<several>(?:either|both|one\s+of)\s+)?{KIND}){LETTER}"
)
LABEL = re.compile(
    r"(?im:^\W*(?:final|choice|option|letter|selected(?:\s+(?:option|choice|answer))?|solution|ans\.?"
    rf"|result|conclusion|correct|verdict|pick)(?:\s*[:=]|\s+is\b|\.)\s*{KIND}){LETTER}"
)
RIGHT = re.compile(
    rf"{LETTER}(?i:\s*(?:is|must\s+be|would\s+be|(?:seems|appears)(?:\s+to\s+be)?|['’]s)\s+(?:clearly\s+|indeed\s+)?(?:the\s+)?"
    r"(?:(?:most(?:\s+likely)?|only|single|one|my)\s+)?(?:correct|right|best|true|answer|accurate|appropriate)\b)"
)
CHOSEN = re.compile(
    r"(?i:\b(?:choose|chose|pick|picked|select|selected|go(?:ing)?\s+with|went\s+with|opt\s+for"
    rf"|answer|guess(?:\s+is)?|say|think(?:\s+it(?:\s+is|['’]s))?|believe)\s+{KIND}){LETTER}"
)
CONCLUDED = re.compile(
    r"(?i:(?:\b(?:so|corresponds\s+to|matches|is\s+(?:option|choice)|i\.e\.|namely|probably|definitely"
    r"|thus|therefore|hence|consequently|(?:it|that|this)(?:\s+is|['’]s)|must\s+be"
    r"|has\s+to\s+be|leaves(?:\s+us\s+with)?|makes\s+it|no|wait|actually|rather|conclusion)"
    rf"|→|=>|⇒|∴|####)[\s,:]*(?:(?:it\s+is|it['’]s|it\s+must\s+be|must\s+be|is)\s+)?{KIND})"
    rf"{LETTER}(?=\s*[.!)]*\s*(?:\n|$))"
)
EAST_ASIAN = re.compile(
    r"(?:答案|正确答案|正確答案|正确的?(?:答案|选项)|正確的?(?:答案|選項)|正解|答え|解答|故选|故選|应选|應選|选择|選擇|选|選|選び|정답|답)"
    rf"\s*(?:应该)?(?:是|为|為|は|が|은|는|이)?\s*[:：]?\s*(?:选项|選項|选|選)?\s*{LETTER}"
)
RIGHT_EAST_ASIAN = re.compile(rf"{LETTER}\s*(?:选项|選項)?\s*(?:是|为|為)?\s*(?:唯一)?正[确確]")
STATEMENTS = (SAID, LABEL, RIGHT, CHOSEN, CONCLUDED)

# What must not stand before a statement in its clause, and not behind a letter.
UNDONE = re.compile(
    r"(?i:\b(?:not|never|neither|nor|cannot|if|whether|suppose|supposing|assume|assuming|unless|"
    r"wrong|incorrect|false|except|(?<!no )doubt|students|people|others|many)\b"
    r"|n['’]t\b)|不是|并非|不选|不選|不$|ではな"
)
CLAUSE = re.compile(r"[.,;:!?\n。，；！？]")
BEHIND_APART = re.compile(
    r"\s*\?|(?i:,?\s+which\s+is\s+(?:wrong|incorrect|false|not\s+(?:right|correct))\b)|(?i:[).:]?\s+(?:is|was|are|can|does|did|would|seems|looks|could|might|may)(?:n['’]t|not)?\b)"
    r"(?!(?i:\s+(?:clearly\s+|indeed\s+)?(?:the\s+)?(?:correct|right|best|true|answer|because)\b))"
)
ENDS_BARE = re.compile(
    r"\s*(?:$|[.,;:!)\]}\n…。，；：、—–]|-\s|=(?!=)|\\)"
    r"|(?i:\s+(?:because|since|as|for|due|which|with|and|or|is|by|that)\b)|\s*[^\x00-\x7f]|\s*[<(&/|]"
)
SEVERAL = re.compile(
    r"\s*(?:,\s*(?:and|or)\b|,|/|&|、|\+|;|\b(?:and|or|y|o|und|oder|et|ou|e)\b|和|或|与|與|及)\s*"
    r"(?:\([A-Za-z]\)|[A-Z](?![A-Za-z0-9'’]))(?!\s+[a-z])"
)


PRONOUN = re.compile(r",\s+(?!because|since)[a-z]")  # "I, too, am unsure"
BEFORE = re.compile(r"(?:\([A-Za-z]\)|\b[A-Z])\s*(?:and|or|/|&|,)\s*$")


@dataclass(frozen=True)
class NamedChoice:
    """A place that names a choice; without a letter it names several, or none of them."""

    at: int
    letter: str


def named(answer: str) -> str:
    """Return the letter, in upper case, of the choice that an answer names; empty if none."""
    given = unicodedata.normalize("NFKC", answer[-LONGEST:]).strip()
    text = _plain(given)
    boxes = (
        NamedChoice(
            match.end(), named(next(group for group in match.groups() if group is not None))
        )
        for match in BOX.finditer(text)
    )
    found = sorted([*boxes, *_statements(text), *_lines(text)], key=lambda one: one.at)
    return found[-1].letter if found else _last_words(given)


def _statements(text: str) -> Iterator[NamedChoice]:
    for pattern in STATEMENTS:
        for match in pattern.finditer(text):
            if (letter := _stated(text, match, pattern is RIGHT)) is not None:
                yield NamedChoice(match.end(), letter)
    for pattern in (EAST_ASIAN, RIGHT_EAST_ASIAN):
        for match in pattern.finditer(text):
            if not _undone(text, match.start()):
                yield NamedChoice(match.end(), _one(text, match))


def _stated(text: str, match: re.Match[str], closed: bool) -> str | None:
    """Return the letter of a statement, empty for several letters; None: it states nothing.

    `closed`: the statement goes on behind the letter, as in "B is correct".
    """
    if _undone(text, match.start()):
        return None
    if match.groupdict().get("several"):
        return ""
    if closed:
        if match["bare"] in ("a", "i"):
            return None
        several = BEFORE.search(text[max(0, match.start() - 20) : match.start()])
        return "" if several else _letter(match)
    if BEHIND_APART.match(text, match.end()):
        return None
    if match["bare"] and not ENDS_BARE.match(text, match.end()):
        return None
    if match["bare"] in ("I", "i") and PRONOUN.match(text, match.end()):
        return None
    if match["bare"] in ("a", "i") and match.re in (CHOSEN, CONCLUDED):  # an article, a pronoun
        return None
    return _one(text, match)


def _one(text: str, match: re.Match[str]) -> str:
    return "" if SEVERAL.match(text, match.end()) else _letter(match)


def _letter(match: re.Match[str]) -> str:
    return str(match["apart"] or match["bare"]).upper()


def _undone(text: str, start: int) -> bool:
    """True if the clause before a statement takes it back."""
    clause = CLAUSE.split(text[max(0, start - 200) : start])[-1]
    return bool(UNDONE.search(clause))


# ---- lines ---------------------------------------------------------------------------------------

PREFIX = re.compile(r"\s*(?:[#>*•\-]+\s*)*")
ALONE = re.compile(rf"(?i:{KIND}){LETTER}[.):!]*\s*")
LABELLED = re.compile(rf"(?i:{KIND}){LETTER}(?:(?<=\))[.:]?|[.):]|(?=\t))\s*\S.*")
LEADING = re.compile(
    LETTER + r"(?:,\s*(?:because|since|as|which|not)\b|\s*[-–—]\s+\w\w|\s+(?:because|since)\b).*"
)
ASKED = re.compile(r"(?m)^\s*Q\s*[:.)]")  # then "A:" is short for the answer
AT_THE_END = re.compile(
    r"(\w+)[\s,]*\(\s*(?:(?:option|choice|answer)\s+)?\**([A-Za-z])\**\s*\)[\s*.!]*$"
)
_THINGS = "figure fig equation eq case step part type table plan group section point line see also"
OTHER_THINGS = frozenset(_THINGS.split())  # (B) behind them is theirs
OUT = re.compile(r"(?i)\b(?:out|eliminat\w+|exclud\w+|reject\w*|unlike|than|without)\b")
SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+")


def _lines(text: str) -> Iterator[NamedChoice]:
    """Yield the first and the last line where they name a choice. A list of all choices names none
    of them.
    """
    lines, at = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            lines.append((at, line[PREFIX.match(line).end() :].strip()))  # type: ignore[union-attr]
        at += len(line)
    labelled = [m for _, line in lines if (m := LABELLED.fullmatch(line))]
    one_choice = len({_letter(match) for match in labelled}) == 1 and not ASKED.search(text)
    for place in dict.fromkeys((0, len(lines) - 1)) if lines else ():
        at, line = lines[place]
        if match := ALONE.fullmatch(line):
            yield NamedChoice(at, _letter(match))
        elif match := LEADING.fullmatch(line):
            yield NamedChoice(at, "" if _rejects(line, match) else _letter(match))
        elif one_choice and (match := LABELLED.fullmatch(line)) and not _rejects(line, match):
            yield NamedChoice(at, _letter(match))


def _rejects(line: str, match: re.Match[str]) -> bool:
    """True if a line with a label speaks of the choice, in place of naming it."""
    end = match.end("apart") + 1 if match["apart"] else match.end("bare")
    return bool(BEHIND_APART.match(line, end) or SEVERAL.match(line, end))


def _last_words(text: str) -> str:
    """Return the only letter in brackets of a last sentence that ends with it: "Paris (B)."."""
    sentence = SENTENCE.split(text)[-1]
    match = AT_THE_END.search(sentence[-100:])
    found = re.findall(r"\(\W*(?:\w{6}\s+)?([A-Za-z])\W*\)", sentence)
    letters = set(map(str.upper, found))
    if match is None or len(letters) != 1 or match[1].lower() in OTHER_THINGS:
        return ""
    return "" if UNDONE.search(sentence) or OUT.search(sentence) else letters.pop()
