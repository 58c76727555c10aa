"""Small tasks on texts."""

from __future__ import annotations

from loadtests.conformance.row import mbpp

ROWS = [
    mbpp(
        "remove_repeats",
        """
import re


def remove_repeats(text):
    return re.sub(r"\\b(\\w+)( \\1\\b)+", r"\\1", text)
""",
        """
assert remove_repeats("the the cat cat cat") == "the cat"
assert remove_repeats("this is") == "this is"
assert remove_repeats("") == ""
""",
        ("( \\1\\b)+", "( \\1\\b)"),
        ("\\b(\\w+)(", "(\\w+)("),
    ),
    mbpp(
        "snake_case",
        """
import re


def snake_case(name):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
""",
        """
assert snake_case("PythonProgram") == "python_program"
assert snake_case("a") == "a"
assert snake_case("getHTTP") == "get_h_t_t_p"
""",
        ("(?<!^)", ""),
        (".lower()", ""),
    ),
    mbpp(
        "swap_ends",
        """
def swap_ends(text):
    return text if len(text) < 2 else text[-1] + text[1:-1] + text[0]
""",
        """
assert swap_ends("abcd") == "dbca"
assert swap_ends("a") == "a"
assert swap_ends("") == ""
""",
        ("text if len(text) < 2 else ", "text if not text else "),
        ("text[1:-1]", "text[1:-1][::-1]"),
    ),
    mbpp(
        "count_words",
        """
def count_words(text):
    out = {}
    for word in text.lower().split():
        word = word.strip(".,!?")
        if word:
            out[word] = out.get(word, 0) + 1
    return out
""",
        """
assert count_words("Go, go! Stop.") == {"go": 2, "stop": 1}
assert count_words("") == {}
assert count_words("... a") == {"a": 1}
""",
        ("        if word:\n            out[word]", "        if True:\n            out[word]"),
        ("text.lower()", "text"),
    ),
    mbpp(
        "is_pangram",
        """
import string


def is_pangram(text):
    return set(string.ascii_lowercase) <= set(text.lower())
""",
        """
assert is_pangram("The quick brown fox jumps over the lazy dog") is True
assert is_pangram("abc") is False
assert is_pangram("ABCDEFGHIJKLMNOPQRSTUVWXYZ.") is True
""",
        ("<= set(text.lower())", "== set(text.lower())"),
        ("text.lower()", "text"),
    ),
    mbpp(
        "split_at_upper",
        """
import re


def split_at_upper(text):
    return re.findall("[A-Z][^A-Z]*", text)
""",
        """
assert split_at_upper("LearnToBuild") == ["Learn", "To", "Build"]
assert split_at_upper("ABC") == ["A", "B", "C"]
assert split_at_upper("none") == []
""",
        ("[^A-Z]*", "[^A-Z]+"),
        ("return re.findall", "return tuple(re.findall", ", text)", ", text))"),
    ),
    mbpp(
        "longest_word",
        """
def longest_word(words):
    return max(words, key=len, default="")
""",
        """
assert longest_word(["aa", "bbb", "ccc"]) == "bbb"
assert longest_word([]) == ""
assert longest_word(["ß", "zz"]) == "zz"
""",
        ("key=len", "key=lambda w: (len(w), w)"),
        (', default=""', ""),
    ),
    mbpp(
        "mask_card",
        """
def mask_card(number, shown=4):
    digits = number.replace(" ", "")
    return "*" * max(0, len(digits) - shown) + digits[max(0, len(digits) - shown):]
""",
        """
assert mask_card("1234 5678") == "****5678"
assert mask_card("12") == "12"
assert mask_card("1234", shown=0) == "****"
""",
        ("digits[max(0, len(digits) - shown):]", "digits[-shown:]"),
        ('number.replace(" ", "")', "number"),
    ),
    mbpp(
        "text_distance",
        """
def text_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]
""",
        """
assert text_distance("kitten", "sitting") == 3
assert text_distance("", "abc") == 3
assert text_distance("saved", "save") == 1
""",
        ("last + (x != y)", "last + 2 * (x != y)"),
        ("row[j] + 1, row[j - 1] + 1", "row[j] + 2, row[j - 1] + 1"),
    ),
    mbpp(
        "expand_ranges",
        """
def expand_ranges(text):
    out = []
    for part in text.split(","):
        if not part:
            continue
        low, _, high = part.partition("-")
        out.extend(range(int(low), int(high or low) + 1))
    return out
""",
        """
assert expand_ranges("1-3,7") == [1, 2, 3, 7]
assert expand_ranges("") == []
assert expand_ranges("5-5,4") == [5, 4]
""",
        ("int(high or low) + 1", "int(high or low) + (not high)"),
        ("return out", "return sorted(out)"),
    ),
    mbpp(
        "ascii_sum",
        """
def ascii_sum(text):
    return sum(text.encode("utf-8"))
""",
        """
assert ascii_sum("ab") == 195
assert ascii_sum("") == 0
assert ascii_sum("é") == 364
""",
        ('sum(text.encode("utf-8"))', "sum(map(ord, text))"),
        ('text.encode("utf-8")', 'text.encode("utf-8")[1:]'),
    ),
    mbpp(
        "camel_to_words",
        """
def camel_to_words(name):
    words, start = [], 0
    for i in range(1, len(name)):
        if name[i].isupper():
            words.append(name[start:i])
            start = i
    words.append(name[start:])
    return [word.lower() for word in words if word]
""",
        """
assert camel_to_words("camelCaseName") == ["camel", "case", "name"]
assert camel_to_words("") == []
assert camel_to_words("X") == ["x"]
""",
        (" if word]", "]"),
        ("    words.append(name[start:])\n", ""),
    ),
    mbpp(
        "zigzag_rows",
        """
def zigzag_rows(text, rows):
    if rows == 1:
        return text
    lines, row, step = [""] * rows, 0, 1
    for c in text:
        lines[row] += c
        if row == 0:
            step = 1
        elif row == rows - 1:
            step = -1
        row += step
    return "".join(lines)
""",
        """
assert zigzag_rows("PAYPALISHIRING", 3) == "PAHNAPLSIIGYIR"
assert zigzag_rows("AB", 1) == "AB"
assert zigzag_rows("", 4) == ""
""",
        ("elif row == rows - 1:", "elif row == rows - 2:"),
        ("        return text\n", "        return list(text)\n"),
    ),
    mbpp(
        "valid_ip",
        """
def valid_ip(text):
    parts = text.split(".")
    return len(parts) == 4 and all(
        p.isascii() and p.isdigit() and int(p) < 256 and (p == "0" or p[0] != "0") for p in parts
    )
""",
        """
assert valid_ip("192.168.0.1") is True
assert valid_ip("256.1.1.1") is False
assert valid_ip("01.1.1.1") is False
""",
        ("int(p) < 256", "int(p) <= 256"),
        (' and (p == "0" or p[0] != "0")', ""),
    ),
]
