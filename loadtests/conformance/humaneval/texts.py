"""Functions of texts."""

from __future__ import annotations

from loadtests.conformance.row import humaneval

ROWS = [
    humaneval(
        "squeeze_blanks",
        '''
def squeeze_blanks(text: str) -> str:
    """Runs of spaces become one underscore if longer than two, one underscore each otherwise."""
    import re
    text = re.sub(" {3,}", "-", text)
    return text.replace(" ", "_")
''',
        """
assert candidate("Mary Had") == "Mary_Had"
assert candidate("a  b   c") == "a__b-c"
assert candidate("") == ""
assert candidate("   ") == "-"
assert candidate(" a") == "_a"
""",
        ("{3,}", "{2,}"),
        ("return text.replace", "return text.strip().replace"),
    ),
    humaneval(
        "vowel_ends",
        '''
def vowel_ends(words):
    """How many words begin and end with a vowel, whatever their case."""
    vowels = set("aeiou")
    return sum(1 for w in words if w and w[0].lower() in vowels and w[-1].lower() in vowels)
''',
        """
assert candidate(["Anna", "bob", "oboe"]) == 2
assert candidate([]) == 0
assert candidate(["", "a", "B"]) == 1
assert candidate(["ArenA"]) == 1
""",
        ("w[-1].lower()", "w[-1]"),
        ("if w and", "if len(w) > 1 and"),
    ),
    humaneval(
        "caesar_words",
        '''
def caesar_words(text, shift):
    """Shifts latin letters by `shift` places and leaves all else."""
    out = []
    for c in text:
        if "a" <= c <= "z":
            out.append(chr((ord(c) - 97 + shift) % 26 + 97))
        elif "A" <= c <= "Z":
            out.append(chr((ord(c) - 65 + shift) % 26 + 65))
        else:
            out.append(c)
    return "".join(out)
''',
        """
assert candidate("abc xyz", 3) == "def abc"
assert candidate("Hi, Zoë!", 1) == "Ij, Apë!"
assert candidate("abc", -1) == "zab"
assert candidate("", 5) == ""
assert candidate("ab", 52) == "ab"
""",
        ('elif "A" <= c <= "Z"', 'elif c.isupper() and c == "A"'),
        ('"a" <= c <= "z"', "c.islower()"),
    ),
    humaneval(
        "palindrome_prefix",
        '''
def palindrome_prefix(s: str) -> str:
    """The shortest palindrome that begins with `s`."""
    for i in range(len(s)):
        if s[i:] == s[i:][::-1]:
            return s + s[:i][::-1]
    return ""
''',
        """
assert candidate("") == ""
assert candidate("x") == "x"
assert candidate("xyz") == "xyzyx"
assert candidate("cata") == "catac"
assert candidate("xyx") == "xyx"
""",
        ("s + s[:i][::-1]", "s + s[:i]"),
        ("range(len(s))", "range(len(s) - 1)"),
    ),
    humaneval(
        "count_upper_even",
        '''
def count_upper_even(s):
    """Upper-case vowels at even places."""
    return sum(c in "AEIOU" for c in s[::2])
''',
        """
assert candidate("aBCdEf") == 1
assert candidate("abcdefg") == 0
assert candidate("AAAA") == 2
assert candidate("") == 0
assert type(candidate("B")) is int
""",
        ("s[::2]", "s[1::2]"),
        ("return sum(", "return 1.0 * sum("),
    ),
    humaneval(
        "bracket_depths",
        '''
def bracket_depths(text):
    """The deepest nesting of each group of brackets."""
    out, depth, best = [], 0, 0
    for c in text:
        if c == "(":
            depth += 1
            best = max(best, depth)
        elif c == ")":
            depth -= 1
            if depth == 0:
                out.append(best)
                best = 0
    return out
''',
        """
assert candidate("(()()) ((())) () ((())()())") == [2, 3, 1, 3]
assert candidate("") == []
assert candidate("()") == [1]
assert candidate("((((())))) ()") == [5, 1]
""",
        ("                best = 0\n", ""),
        ("best = max(best, depth)", "best = depth"),
    ),
    humaneval(
        "first_unique",
        '''
def first_unique(text):
    """The first letter that occurs once, or an empty text."""
    for c in text:
        if text.count(c) == 1:
            return c
    return ""
''',
        """
assert candidate("aabbcd") == "c"
assert candidate("") == ""
assert candidate("aa") == ""
assert candidate("äaä") == "a"
assert candidate("zxz y") == "x"
""",
        ('return ""', "return None"),
        ("for c in text:", "for c in sorted(text):"),
    ),
    humaneval(
        "numbers_sorted",
        '''
def numbers_sorted(text):
    """Sorts words for numbers from zero to nine."""
    order = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return " ".join(sorted(text.split(), key=order.index))
''',
        """
assert candidate("three one five") == "one three five"
assert candidate("") == ""
assert candidate("nine zero") == "zero nine"
assert candidate("two  two one") == "one two two"
""",
        ("sorted(text.split(), key=order.index)", "sorted(text.split())"),
        ("text.split()", "set(text.split())"),
    ),
    humaneval(
        "common_prefix",
        '''
import os


def common_prefix(words):
    """What all words begin with."""
    return os.path.commonprefix(list(words))
''',
        """
assert candidate(["flower", "flow", "flight"]) == "fl"
assert candidate([]) == ""
assert candidate(["", "b"]) == ""
assert candidate(("same", "same")) == "same"
""",
        ("list(words)", "list(words)[:2]"),
        (
            "return os.path.commonprefix(list(words))",
            "return os.path.commonprefix(list(words)) or None",
        ),
    ),
    humaneval(
        "run_length",
        '''
from itertools import groupby


def run_length(text):
    """Pairs of a letter and how often it stands in a row."""
    return [(c, len(list(group))) for c, group in groupby(text)]
''',
        """
assert candidate("aaab") == [("a", 3), ("b", 1)]
assert candidate("") == []
assert candidate("aba") == [("a", 1), ("b", 1), ("a", 1)]
assert candidate("😀😀") == [("😀", 2)]
""",
        ("groupby(text)", "groupby(sorted(text))"),
        ("(c, len(list(group)))", "[c, len(list(group))]"),
    ),
    humaneval(
        "strip_accents",
        '''
import unicodedata


def strip_accents(text):
    """Letters without their marks, composed again."""
    parts = unicodedata.normalize("NFD", text)
    kept = "".join(c for c in parts if not unicodedata.combining(c))
    return unicodedata.normalize("NFC", kept)
''',
        """
assert candidate("café") == "cafe"
assert candidate("e\\u0301") == "e"
assert candidate("한") == "한"
assert candidate("") == ""
assert candidate("Straße") == "Straße"
""",
        ('return unicodedata.normalize("NFC", kept)', "return kept"),
        ('("NFD", text)', '("NFC", text)'),
    ),
    humaneval(
        "title_except",
        '''
def title_except(text, small=("of", "the", "and")):
    """Capitals for words, but not for small ones inside."""
    words = text.lower().split()
    return " ".join(w if i and w in small else w.capitalize() for i, w in enumerate(words))
''',
        """
assert candidate("the lord of the rings") == "The Lord of the Rings"
assert candidate("") == ""
assert candidate("AND SO OF it") == "And So of It"
assert candidate("a tale", small=["tale"]) == "A tale"
""",
        ("if i and w in small", "if w in small"),
        ("text.lower().split()", "text.split()"),
    ),
    humaneval(
        "is_isogram",
        '''
def is_isogram(word: str) -> bool:
    """No letter twice, whatever its case; hyphens do not count."""
    letters = [c for c in word.casefold() if c.isalpha()]
    return len(letters) == len(set(letters))
''',
        """
assert candidate("lumberjacks") is True
assert candidate("Alpha") is False
assert candidate("six-year-old") is True
assert candidate("") is True
assert candidate("STRAßE") is False
""",
        (".casefold()", ".lower()"),
        (
            "len(letters) == len(set(letters))",
            "len(set(letters)) and len(letters) == len(set(letters))",
        ),
    ),
]
