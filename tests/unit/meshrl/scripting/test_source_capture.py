"""Functions and classes of a notebook's cells, as a module that other processes import."""

from __future__ import annotations

import functools
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.bundle.source_locations import GENERATED_MODULE, locate_error
from meshrl.scripting.source_capture import CodeCapture
from tests.unit.meshrl.scripting.cells import Notebook

TOOLS = """
import collections.abc as kinds, json as plain, os.path, re
from dataclasses import dataclass
from math import inf, sqrt as root
from typing import Any
PATTERN, SCALES, LIMIT = re.compile("[a-c]+", re.I), {"low": (1, [2.5])}, inf
class Rejected(Exception):
    pass
@dataclass
class Answer:
    text: str
    weight: "float" = 2.0
"""
REWARD = """
import functools
def counted(function):
    @functools.wraps(function)
    def call(*values):
        return function(*values) + 100
    return call
def is_fine(text: Unknown) -> bool:
    return bool(PATTERN.fullmatch(text))
def sum(values):
    return -1
@counted
def reward(row: dict[str, Any], turns):
    if not is_fine(row["prompt"]):
        raise Rejected(plain.dumps(row))
    assert isinstance([], kinds.Sequence) and os.path.join("a", "b") and LIMIT > 1
    return Answer("x").weight * SCALES["low"][1][0] + root(4) + sum([7])
"""


def load(capture: CodeCapture, directory: Path) -> dict[str, Any]:
    """Return the names of the generated module, executed as by a process that imports its file."""
    path = directory / f"{GENERATED_MODULE}.py"
    path.write_text(capture.text)
    linecache.checkcache(str(path))
    names: dict[str, Any] = {"__name__": GENERATED_MODULE}
    sys.modules[GENERATED_MODULE] = type(sys)(GENERATED_MODULE)  # dataclasses look it up
    try:
        exec(compile(capture.text, str(path), "exec", dont_inherit=True), names)
    finally:
        del sys.modules[GENERATED_MODULE]
    return names


@pytest.fixture
def notebook() -> Notebook:
    """Make a notebook with the cells of tools and of a reward."""
    cells = Notebook().execute(TOOLS)
    cells.names["Unknown"] = object()  # in an annotation only
    return cells.execute("from __future__ import annotations\n" + REWARD)


def test_captured_function_computes_as_in_its_notebook(notebook: Notebook, tmp_path: Path) -> None:
    capture = CodeCapture()
    assert capture.add("reward.use", notebook["reward"]) == "inline_code:reward"
    names = load(capture, tmp_path)
    assert names["reward"]({"prompt": "AbC"}, []) == 106.0
    assert notebook["reward"]({"prompt": "AbC"}, []) == 106.0
    assert "Unknown" not in names


def test_error_of_captured_code_names_the_line_of_its_cell(
    notebook: Notebook, tmp_path: Path
) -> None:
    capture = CodeCapture()
    capture.add("reward.use", notebook["reward"])
    reward = load(capture, tmp_path)["reward"]
    with pytest.raises(Exception, match="prompt") as caught:
        reward({"prompt": "7"}, [])
    line = 1 + REWARD.splitlines().index("        raise Rejected(plain.dumps(row))") + 1
    assert locate_error(caught.value, str(tmp_path)) == f"2.py:{line} in reward()"


def test_class_of_a_later_cell_replaces_an_earlier_one(tmp_path: Path) -> None:
    cells = Notebook()
    for number in (1, 2):
        cells.execute(f"class Kind(Exception):\n    number = {number}\n")
        cells.execute(
            f"class Game:\n    def open(self, row):\n        return Kind.number, {number}"
        )
    capture = CodeCapture()
    capture.add("environment.use", cells["Game"])
    assert load(capture, tmp_path)["Game"]().open({}) == (2, 2)


def test_constant_is_carried_with_its_present_value(tmp_path: Path) -> None:
    cells = Notebook().execute("LIMIT = 1\ndef f(x=LIMIT):\n    return x, LIMIT")
    cells.names["LIMIT"] = {"a": {1, 2}, "b": b"\\"}
    capture = CodeCapture()
    capture.add("reward.use", cells["f"])
    assert load(capture, tmp_path)["f"]()[1] == cells.names["LIMIT"]


def test_functions_that_call_each_other_are_captured_once(tmp_path: Path) -> None:
    cells = Notebook().execute(
        "def even(n):\n    return n == 0 or odd(n - 1)\n"
        "def odd(n):\n    return n != 0 and even(n - 1)"
    )
    capture = CodeCapture()
    references = [capture.add("a", cells["even"]), capture.add("b", cells["odd"])]
    assert references == ["inline_code:even", "inline_code:odd"]
    assert load(capture, tmp_path)["even"](10) and capture.text.count("def odd") == 1


def test_module_of_the_user_is_referenced_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_scores").mkdir()
    (tmp_path / "my_scores/__init__.py").write_text("from my_scores.exact import score\n")
    (tmp_path / "my_scores/exact.py").write_text("def score(row, turns):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cells = Notebook().execute(
        "import json\nfrom my_scores import score\n"
        "def half(row, turns):\n    return score(row, turns) / 2"
    )
    try:
        capture = CodeCapture()
        assert capture.add("a", cells["score"]) == "my_scores.exact:score"
        assert capture.text == ""
        assert capture.add("b", cells["half"]) == "inline_code:half"
        assert capture.add("c", cells["json"].dumps) == "json:dumps"
        assert capture.module_roots == {"my_scores.exact": str(tmp_path)}
    finally:
        for name in ("my_scores", "my_scores.exact"):
            sys.modules.pop(name)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("f = lambda row, turns: 1", "reward.use is a lambda"),
        ("import functools\nf = functools.partial(print, 1)", "of type partial, not a function"),
        ("class A:\n    def f(self): ...\nf = A().f", "of type method, not a function"),
        ("f = 3", "of type int, not a function"),
        (
            "def make(n):\n    def g(row, turns):\n        return n\n    return g\nf = make(2)",
            "g uses 'n', a variable of the function around it",
        ),
        ("def f(row, turns):\n    return absent", "f uses 'absent', which is not defined"),
        (
            "import threading\nlock = threading.Lock()\ndef f(row, turns):\n    lock.acquire()",
            "f uses 'lock', whose value of type lock is no constant",
        ),
        (
            "TABLE = [print]\ndef g():\n    return TABLE\ndef f(row, turns):\n    return g()",
            "reward.use: f: g uses 'TABLE', whose value of type list is no constant",
        ),
        ("g = lambda: 1\ndef f(row, turns):\n    return g()", "f uses 'g', which is a lambda"),
        ("TEXT = 'x' * 2_000_000\ndef f(row, turns):\n    return TEXT", "1048576 characters"),
    ],
)
def test_code_that_no_other_process_can_have_is_refused_by_name(cell: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CodeCapture().add("reward.use", Notebook().execute(cell)["f"])
    assert words in str(caught.value)
    assert caught.value.fix


def test_code_without_source_is_refused_by_name() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(row, turns):\n    return 1.0", names)
    with pytest.raises(ConfigError, match="source of typed is not available"):
        CodeCapture().add("reward.use", names["typed"])


def test_two_objects_of_one_name_are_refused() -> None:
    capture = CodeCapture()
    capture.add("a", Notebook().execute("def f(row, turns):\n    return 1.0")["f"])
    with pytest.raises(ConfigError, match="two different objects named 'f'"):
        capture.add("b", Notebook().execute("def f(row, turns):\n    return 2.0")["f"])


def test_partial_function_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="Pass its class, or a function"):
        CodeCapture().add("reward.use", functools.partial(print))
