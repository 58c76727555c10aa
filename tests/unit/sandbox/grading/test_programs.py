"""Which of an answer is its program."""

from __future__ import annotations

import ast
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.grading.answers import spoken
from services.sandbox.grading.code.programs import prefixed, program_of

READS = "n = int(input())\nprint(n + 1)\n"
WRITES = "with open('in.txt', 'w') as file:\n    file.write('1')\n"
OPENS = "for line in open(0):\n    print(line)\n"
IF = "if input():\n    print(1)\n"
F = "def f(x):\n    return x + 1\n"
FENCED = 'TEXT = """\n```python\nx\n```\n"""\nprint(TEXT, input())\n'


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (READS, READS),
        ("So:\n```python\nx = 1\n```\n", "x = 1\n"),
        ("```\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("```python\na\n```\nand ```open", "a\n"),
        ("`x`", "`x`"),
        (f"```python\n{READS}```\nIt prints:\n```\n5\n```\n", READS),
        (f"```\n{READS}```\nIt prints:\n```\n5\n```\n", READS),
        (f"```\n{READS}```\n```text\nprint(7)\n```\n", READS),
        (f"```\n{READS}```\n```\nx = 5\n```\n", READS),
        (f"```python\n{READS}```\nRun it:\n```bash\npython main.py\n```\n", READS),
        (f"```python\n{READS}```\n```\nhello world\n```", READS),
        (f"```python\nprint(0)\n```\nNo:\n```python\n{READS}```\n", READS),
        (f"```python\n{READS}```\nThe sum is\n```python\ntotal = n + 1\n```\n", READS),
        (f"~~~python\n{READS}~~~\n", READS),
        (f"````python\n{READS}````\n", READS),
        (f"````markdown\n```python\nprint(1)\n```\n````\n```python\n{READS}```", READS),
        (f"````markdown\nSo:\n```python\n{READS}```\n5\n````\n", READS),
        (f"~~~~md\n```python\n{READS}```\n~~~~\nIt prints 5.", READS),
        (f"```python\n{READS}```\nTry:\n```python\n{WRITES}```\n", READS),
        (f"```python\n{OPENS}```\nTry:\n```python\n{WRITES}```\n", OPENS),
        (f"```python\n# no </think> here\n{READS}```\n", f"# no </think> here\n{READS}"),
        (f"```python\nprint(0)\n```\n# so </think>\n{READS}", READS),
        (f"<think>\n```python\n# hm </think>\n{READS}", READS),
        ("1. So:\n   ```python\n   if input():\n       print(1)\n   ```\n", IF),
        ("- ```python\n  if input():\n      print(1)\n  ```\n", IF),
        ("```python\n    if input():\n        print(1)\n```\n", IF),
        (f"```python\n{FENCED}```\n", FENCED),
        (f"~~~\n{FENCED}~~~\n", FENCED),
        (FENCED, FENCED),
        (f'```python title="main.py" {{1,2}}\n{READS}```', READS),
        (f"```{{.python .lines}}\n{READS}```", READS),
        (f"```main.py\n{READS}```", READS),
        (f"```Python3\n{READS}```", READS),
        (f"Here: ```python\n{READS}```", READS),
        (f"```python\n{READS}", READS),
        (f"```python\n{READS}```\nOr:\n```python\nprint(", READS),
        (f"<think>```python\nprint(0)\n```</think>```python\n{READS}```", READS),
        (f"```python\nprint(input(), 0)\n```\n</think>\n{READS}", READS),
        (f"<think>```python\n{READS}```", ""),
        ("```python\nprint(input(), '</think>')\n```", "print(input(), '</think>')\n"),
        (f"```python\r\n{READS}```\r\n".replace("\n", "\r\n"), READS),
        (f"```\nprint(0)\n```\n<answer>```\n{READS}```</answer><|end|>", READS),
        (f"```\nprint(0)\n```\n<answer>\n```python\n{READS}```\n</answer>", READS),
        ("```python x = 1```", "x = 1"),
        ("```python\nprint(1)```", "print(1)"),
        ("```x = 1\nprint(x)\n```", "x = 1\nprint(x)\n"),
        ("```python\nprint(1\n```", "print(1\n"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_last_block_that_is_a_program_counts(text: str, program: str) -> None:
    assert program_of(spoken(text) or "", prints=True) == program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"```python\n{F}```\nFor example\n```python\nprint(f(3))\n```\n```\n4\n```", F),
        (f"```python\n{F}```\n```python\nassert f(3) == 4\nf(input())\n```", F),
        (f"```python\ndef f(x): pass\n```\n```python\n{F}```\n", F),
        (f"```python\nclass Solution:\n    {F.replace(chr(10), chr(10) + '    ')}\n```\n", None),
        (f"```\n{F}```\n```python\nresult = f(2)\n```", F),
        ("```python\nf = lambda x: x\n```\n```python\nf(1)\n```", "f = lambda x: x\n"),
        ("```python\nfrom math import gcd as f\n```\n```\nf\n```", "from math import gcd as f\n"),
        (f"{F}\n# ```\n", f"{F}\n# ```\n"),
        (f"```python\n{F}```\n```python\nfrom solution import f\ndef test(): f(1)\n```", F),
        (f"```python\n{F}```\n```python\nf = Solution().f\nprint(f(1))\n```", F),
    ],
)
def test_the_last_block_that_defines_what_is_called_counts(text: str, program: str | None) -> None:
    found = program_of(text, names={"f"})
    assert found == program if program else "class Solution" in found


def test_a_block_that_defines_all_that_is_tested_comes_before_one_of_a_part() -> None:
    both = f"class A: pass\n{F}"
    text = f"```python\n{both}```\nThe second again:\n```python\n{F}```\n"
    assert program_of(text, names={"A", "f"}) == both
    assert program_of(text, names={"f"}) == F


def test_a_prefix_is_parsed_with_what_follows_it() -> None:
    text = "```python\n    return x + 1\n```\nprints\n```\n5\n```"
    assert program_of(text, prefix="def f(x):\n", names={"f"}) == "    return x + 1\n"


@pytest.mark.parametrize(
    "program",
    [
        f"from __future__ import annotations\n{F}",
        f'"""Doc."""\n# so\nfrom __future__ import (\n    annotations,\n    division,\n)\n{F}',
        f"from __future__ import division; import sys\nfrom __future__ import annotations\n{F}",
        f"TEXT = '__future__'\n{F}",
    ],
)
@pytest.mark.parametrize("prefix", ["import math\n", "from __future__ import generators\nx = 1\n"])
def test_a_prefix_comes_behind_what_python_wants_first(prefix: str, program: str) -> None:
    found: dict[str, Any] = {}
    source = prefixed(prefix, program_of(f"```python\n{program}```", prefix, {"f"}))
    exec(compile(source, "main.py", "exec", dont_inherit=True), found)
    assert found["f"](1) == 2 and source.endswith(F)
    assert program_of(f"```python\n{program}```\n```\nx = 5\n```", prefix, {"f"}) == program


PROGRAMS = st.sampled_from(
    [
        READS,
        FENCED,
        "import sys\nfor line in sys.stdin:\n    print(line)\n",
        "s = '```'\nprint(s * int(input()))\n",
        "def main():\n    '''\n    ~~~\n    Reads.\n    ~~~\n    '''\n    print(input())\nmain()\n",
        "print(r'''\n```\nin\n```\nbetween\n~~~~\n''', input())\n",
        "if True:\n\n\tprint(input(), '</think>')\n",
    ]
)
PROSE = st.sampled_from(
    ["", "Let me see.", "It's O(n).", "Use `print` here:", "* a list\n* of `x = 1`", "> quoted"]
)
NOISE = st.sampled_from(
    ["", "```\n5\n```", "```text\nprint(1)\n```", "```\n1 2 3\n```", "~~~json\n{}\n~~~", "`5`"]
)
FENCES = st.sampled_from(["```", "~~~", "`````", "~~~~~~"])
TAGS = st.sampled_from(["python", "py", "Python", "python3", 'python title="a b"', ""])
INDENTS = st.sampled_from(["", "  ", "   "])


@settings(max_examples=50)
@given(PROGRAMS, PROSE, NOISE, PROSE, NOISE, FENCES, TAGS, INDENTS, st.booleans())
def test_a_program_in_markdown_is_found_whatever_surrounds_it(
    program: str,
    before: str,
    noise: str,
    after: str,
    more: str,
    fence: str,
    tag: str,
    indent: str,
    crlf: bool,
) -> None:
    block = "".join(
        indent + line if line.strip() else line
        for line in f"{fence}{tag}\n{program}{fence}\n".splitlines(keepends=True)
    )
    text = "\n\n".join([before, noise, block, after, more])
    found = program_of(text.replace("\n", "\r\n") if crlf else text, prints=True)
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(program)) or indent
    assert compile(found, "found", "exec").co_names == compile(program, "as", "exec").co_names


@given(st.text(alphabet="`~\n pf(x)='\"1:", max_size=200))
def test_any_text_has_a_program_or_none(text: str) -> None:
    assert isinstance(program_of(text, names={"f"}), str)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 50_000,
        "```python\n" * 30_000,
        "```python\n" + "x = (\n```\n" * 30_000,
        "```python\n" + "(" * 100_000,
        "`" * 200_000,
        " " * 200_000 + "```",
        "a ```" * 50_000,
        "</think>" * 30_000,
        "```\n" + "x = 1\n" * 100_000 + "```\n" + "```\nprint()\n```\n" * 1000,
        "\n".join("`" * k for k in range(600, 3, -1)),
        "<a>" * 70_000 + "\n" + "```" + " " * 100_000 + "<a> " * 20_000,
    ],
    ids=range(11),
)
def test_a_hostile_text_is_soon_read(text: str) -> None:
    begun = time.thread_time()
    program_of(spoken(text) or "", prints=True)
    assert time.thread_time() - begun < 3.0
