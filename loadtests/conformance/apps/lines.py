"""Programs of lines and words."""

from __future__ import annotations

from loadtests.conformance.row import apps

ROWS = [
    apps(
        "word_frequencies",
        """
import sys
from collections import Counter

words = sys.stdin.read().lower().split()
for word, count in sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])):
    print(word, count)
""",
        [("b a b\n", "b 2\na 1\n"), ("c B a b A\n", "a 2\nb 2\nc 1\n"), ("", "")],
        ("(-item[1], item[0])", "-item[1]"),
        (".lower()", ""),
    ),
    apps(
        "balanced_brackets",
        """
import sys

PAIRS = {")": "(", "]": "[", "}": "{"}


def balanced(text):
    stack = []
    for c in text:
        if c in "([{":
            stack.append(c)
        elif c in PAIRS and (not stack or stack.pop() != PAIRS[c]):
            return False
    return not stack


for line in sys.stdin:
    print("YES" if balanced(line) else "NO")
""",
        [("([]){}\n([)]\n", "YES\nNO\n"), ("((\n\n", "NO\nYES\n"), (")\n", "NO\n")],
        ("return not stack", "return True"),
        ("not stack or stack.pop()", "stack and stack.pop()"),
    ),
    apps(
        "caesar_lines",
        """
import sys

shift = int(input())
for line in sys.stdin:
    line = line.rstrip("\\n")
    print("".join(
        chr((ord(c) - 97 + shift) % 26 + 97) if c.islower() and c.isascii() else c for c in line
    ))
""",
        [
            ("1\nabz!\n", "bca!\n"),
            ("-1\na b\n", "z a\n"),
            ("3\néX\n\nx\n", "éX\n\na\n"),
            ("26\nsame\n", "same\n"),
        ],
        (" and c.isascii()", ""),
        (") % 26 + 97", " + 0) % 25 + 97"),
    ),
    apps(
        "longest_line",
        """
import sys

lines = sys.stdin.read().splitlines()
print(max(lines, key=len, default="(none)"))
""",
        [("a\nbbb\nccc\n", "bbb\n"), ("", "(none)\n"), ("one\ntwo words\n", "two words\n")],
        ("key=len", "key=lambda l: (len(l), l)"),
        (', default="(none)"', ""),
    ),
    apps(
        "roman_sum",
        """
VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def value(text):
    total = 0
    for c, after in zip(text, text[1:] + " "):
        v = VALUES[c]
        total += -v if v < VALUES.get(after, 0) else v
    return total


print(sum(value(word) for word in input().split()))
""",
        [("XIV VI\n", "20\n"), ("MCMXCIV\n", "1994\n"), ("\n", "0\n"), ("III\n", "3\n")],
        ("v < VALUES", "v <= VALUES"),
        ('text[1:] + " "', "text[1:]"),
    ),
    apps(
        "compress_runs",
        """
from itertools import groupby

text = input()
out = "".join(f"{c}{n}" if n > 1 else c for c, n in ((c, len(list(g))) for c, g in groupby(text)))
print(out if len(out) < len(text) else text)
""",
        [
            ("aaabcc\n", "a3bc2\n"),
            ("abc\n", "abc\n"),
            ("aa\n", "aa\n"),
            ("zzzzzzzzzzzz\n", "z12\n"),
        ],
        ("len(out) < len(text)", "len(out) <= len(text)"),
        ('f"{c}{n}" if n > 1', 'f"{c}{n % 10}" if n > 1'),
    ),
    apps(
        "csv_columns",
        """
import csv
import sys

rows = list(csv.reader(sys.stdin))
head, *body = rows
i = head.index("price")
print(f"{sum(float(row[i]) for row in body):.2f}")
""",
        [
            ('name,price\n"a, b",1.50\nc,2\n', "3.50\n"),
            ("price\n", "0.00\n"),
            ('price,x\n"1.005",y\n-1,z\n', "0.00\n"),
        ],
        ("csv.reader(sys.stdin)", 'line.strip().split(",") for line in sys.stdin'),
        ("head, *body = rows", "head, body = rows[0], rows[1:-1] or rows[1:]"),
    ),
    apps(
        "palindromes_count",
        """
text = input().strip()
count = 0
for middle in range(2 * len(text) - 1):
    low, high = middle // 2, middle // 2 + middle % 2
    while low >= 0 and high < len(text) and text[low] == text[high]:
        count += 1
        low, high = low - 1, high + 1
print(count)
""",
        [("aba\n", "4\n"), ("\n", "0\n"), ("aaa\n", "6\n"), ("äöä\n", "4\n")],
        ("2 * len(text) - 1", "2 * len(text) - 2"),
        ("low >= 0", "low > 0"),
    ),
    apps(
        "acronyms",
        """
import sys

for line in sys.stdin:
    words = line.replace("-", " ").split()
    print("".join(word[0].upper() for word in words) or "?")
""",
        [
            ("portable network graphics\nfirst-in first-out\n", "PNG\nFIFO\n"),
            ("\n", "?\n"),
            ("été\n", "É\n"),
        ],
        ('.replace("-", " ")', ""),
        (' or "?"', ""),
    ),
    apps(
        "diff_lines",
        """
n, m = map(int, input().split())
a = [input() for _ in range(n)]
b = [input() for _ in range(m)]
for line in a:
    if line not in b:
        print("-", line)
for line in b:
    if line not in a:
        print("+", line)
""",
        [
            ("2 2\nx\ny\ny\nz\n", "- x\n+ z\n"),
            ("0 1\na\n", "+ a\n"),
            ("1 1\na \na\n", "- a\n+ a\n"),
            ("1 0\n\n", "-\n"),
        ],
        ("a = [input() for", "a = [input().strip() for"),
        ("if line not in a", "if line in b and line not in a[:1]"),
    ),
    apps(
        "text_wrap",
        """
width = int(input())
line = ""
for word in input().split():
    if line and len(line) + 1 + len(word) > width:
        print(line)
        line = word
    else:
        line = f"{line} {word}" if line else word
if line:
    print(f"[{line}]")
""",
        [
            ("7\nab cde fg\n", "ab cde\n[fg]\n"),
            ("6\nab cde f\n", "ab cde\n[f]\n"),
            ("3\n\n", ""),
            ("1\nlong\n", "[long]\n"),
        ],
        ("> width", ">= width"),
        ("if line:\n    print(f", "if True:\n    print(f"),
    ),
    apps(
        "hex_dump",
        """
import sys

data = sys.stdin.buffer.read()
for start in range(0, len(data), 4):
    part = data[start : start + 4]
    shown = "".join(chr(b) if 33 <= b < 127 else "." for b in part)
    print(f"{start:04x} {part.hex()} {shown}")
""",
        [("abcde", "0000 61626364 abcd\n0004 65 e\n"), ("", ""), ("é \n", "0000 c3a9200a ....\n")],
        ("33 <= b", "32 < b + 1"),
        ("start + 4]", "start + 3]"),
    ),
]
