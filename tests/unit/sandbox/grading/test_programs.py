"""Which of an answer is its program."""

from __future__ import annotations

import ast
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.grading.answers import spoken
from meshrl.services.sandbox.grading.code.programs import prefixed, program_of

ROWS = tomllib.loads((Path(__file__).parent / "programs.toml").read_text())
READS, F, FENCED = (ROWS["blocks"][name] for name in ("READS", "F", "FENCED"))


def cases(kind: str) -> list[tuple[str, str]]:
    """Return the answers of a kind with their programs, each with its blocks in it."""

    def whole(text: str) -> str:
        for name, block in ROWS["blocks"].items():
            text = text.replace(f"@{name}@", block)
        return text

    return [(whole(row["text"]), whole(row["program"])) for row in ROWS[kind]]


@pytest.mark.parametrize(("text", "program"), cases("prints"))
def test_the_last_block_that_is_a_program_counts(text: str, program: str) -> None:
    assert program_of(spoken(text) or "", prints=True) == program


@pytest.mark.parametrize(("text", "program"), cases("defines"))
def test_the_last_block_that_defines_what_is_called_counts(text: str, program: str) -> None:
    assert program_of(text, names={"f"}) == program


def test_a_class_that_defines_what_is_called_counts() -> None:
    method = F.replace("\n", "\n    ")
    text = f"```python\nclass Solution:\n    {method}\n```\n"
    assert "class Solution" in program_of(text, names={"f"})


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
