"""Modules that documents name, walks through code, and the size of the product."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("common", "examples", "kernels", "loadtests", "meshrl", "services", "sim", "tests")
_TOP = "|".join(PACKAGES)
_PATH = re.compile(rf"(?<![\w./-])(?:\.\./)?((?:{_TOP})(?:/\w+)+\.py)\b")
_FOLDER = re.compile(rf"`((?:{_TOP})(?:/\w+)+)/?`")
_LINKED = {"common", "kernels", "services", "sim"}  # importable as `meshrl.common` and so on
_DOTTED = re.compile(rf"(?:`|\"|-m )((?:{_TOP})(?:\.(?!(?:json|lock|py)\b)\w+)+)(?=[`\"\s])")
_FIRST = re.compile(r"Open\s+`([\w/]+\.py)`\s+first")
_FILE = re.compile(r"`(\w+\.py)`")
CODE = ("common", "loadtests", "meshrl", "services", "sim")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OTHERS = {"grpo_trainer.py"}  # TRL's
FILES = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
WALKS = (ROOT / "docs" / "walks.md").read_text()
FILES_OPENED, RETURNS = 12, 2  # of a walk, at most
_CODE = re.compile(r"`([^`]+)`")
PRODUCT = ("common", "kernels", "meshrl", "services", "sim")


def is_named_well(dotted: str) -> bool:
    """Whether it is a module or a package, or a name within one."""
    if dotted.partition(".")[0] in _LINKED:
        return False
    place = ROOT / dotted.replace(".", "/")
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    module = place.parent.with_suffix(".py")
    module = module if module.is_file() else place.parent / "__init__.py"
    return module.is_file() and re.search(rf"\b{place.name}\b", module.read_text()) is not None


def missing_in(text: str) -> list[str]:
    """What a text names as a module of ours that is none."""
    paths = [path for path in _PATH.findall(text) if not (ROOT / path).is_file()]
    folders = [
        path
        for path in _FOLDER.findall(text)
        if not (ROOT / path).exists() and not (ROOT / f"{path}.py").is_file()
    ]
    return paths + folders + [name for name in _DOTTED.findall(text) if not is_named_well(name)]


def code() -> list[Path]:
    return [path for package in CODE for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    assert missing_in(text) == []
    assert set(_FILE.findall(text)) <= FILES | OF_OTHERS


def test_every_module_that_code_names_in_its_words_exists() -> None:
    missing = {str(path): missing_in(path.read_text()) for path in code()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_the_file_to_open_first_lies_in_its_folder() -> None:
    rooms = [path for path in code() if path.name == "__init__.py"]
    first = {path: _FIRST.findall(path.read_text()) for path in rooms}
    assert sum(map(len, first.values())) > len(rooms) / 2
    assert [
        path for path in first for name in first[path] if not (path.parent / name).is_file()
    ] == []


@pytest.mark.parametrize(
    "words",
    [
        "`common/mesh/runtime/gone.py`",
        "see common/mesh/runtime/gone.py:",
        "[here](../common/mesh/runtime/gone.py)",
        "`services/planner/gone`",
        "`meshrl.common.mesh.runtime.gone`",
        "`common.mesh.runtime.mesh`",
        "`meshrl.common.mesh.runtime.mesh.Gone`",
        "`python -m meshrl.services.planner.gone <look.json`",
        '[sys.executable, "-m", "meshrl.services.planner.gone"]',
    ],
)
def test_a_module_that_is_gone_is_noticed(words: str) -> None:
    assert len(missing_in(words)) == 1
    assert (
        missing_in(
            "`common/base/clock.py` `meshrl.common.mesh.runtime.mesh.Mesh` `services/planner`"
        )
        == []
    )


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
    assert 5 <= len(set(opened)) <= FILES_OPENED
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


def test_the_product_has_no_more_lines_than_its_limit() -> None:
    files = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    lines = sum(len(path.read_bytes().splitlines()) for path in files)
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["meshrl"]["product_lines"]
    assert len(files) > len(PRODUCT)
    assert lines <= limit, f"{lines} lines of Python; the limit in pyproject.toml is {limit}"
