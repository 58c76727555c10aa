"""`docs/walks.md` leads to code that exists, in few steps."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WALKS = (ROOT / "docs" / "walks.md").read_text()
FILES, RETURNS = 12, 2  # of a walk, at most
_CODE = re.compile(r"`([^`]+)`")


def walks() -> dict[str, list[str]]:
    """The text of each step, by the walk's title."""
    found: dict[str, list[str]] = {}
    for section in WALKS.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found[title] = [" ".join(step.split()) for step in re.split(r"\n\d+\. ", text)[1:]]
    return found


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in inner}
    return found


@pytest.mark.parametrize("title", walks())
def test_a_walk_is_short_and_every_file_and_name_in_it_exists(title: str) -> None:
    steps = walks()[title]
    opened = [word for step in steps for word in _CODE.findall(step) if word.endswith(".py")]
    assert 5 <= len(set(opened)) <= FILES
    assert sum(a != b for a, b in pairwise(opened)) + 1 - len(set(opened)) <= RETURNS
    for number, step in enumerate(steps, 1):
        words = _CODE.findall(step)
        files = [ROOT / word for word in words if word.endswith(".py")]
        assert files and not [f for f in files if not f.is_file()], f"{title}, step {number}"
        known = set().union(*map(names_in, files))
        code = {w for w in words if not w.endswith(".py") and re.fullmatch(r"[\w.]+", w)}
        missing = code - known - {"ready"}
        assert not missing, f"{title}, step {number}: {missing}"
        assert code & known, f"{title}, step {number} names nothing to read"


def test_a_name_that_is_gone_is_noticed() -> None:
    assert "Stay.generate" in names_in(ROOT / "services/rollout/routing/stay.py")
    assert "Stay.gone" not in names_in(ROOT / "services/rollout/routing/stay.py")
