"""Errors on the wire: each class arrives as itself."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshrl.common.base.errors import DeadlineExceeded, MeshError, from_wire, to_wire

ROOT = Path(__file__).parents[5]
_CLASS = re.compile(r"^class (\w+)\(([\w., ]+)\)", re.MULTILINE)


def errors() -> list[type[MeshError]]:
    """Every class of the program below MeshError, found in its text: what no other test has
    imported is among them, and only their modules are imported.
    """
    made: list[tuple[str, str, set[str]]] = []
    for package in ("common", "services", "meshrl", "sim"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            module = f"meshrl.{module.removeprefix('meshrl.')}"
            for name, bases in _CLASS.findall(path.read_text()):
                made.append(
                    (module, name, {b.strip().rpartition(".")[2] for b in bases.split(",")})
                )
    known, size = {"MeshError"}, 0
    while len(known) > size:
        size = len(known)
        known |= {name for _, name, bases in made if bases & known}
    found = [(module, name) for module, name, bases in made if bases & known]
    optional = [] if find_spec("verifiers") else ["meshrl.services.environment.verifying.episode"]
    return [getattr(import_module(m), name) for m, name in found if m not in optional]


def test_each_error_arrives_as_the_class_that_was_raised() -> None:
    every = errors()
    assert len(every) > 25
    for cls in every:
        made = cls("it went wrong", where="there")
        arrived = from_wire(*to_wire(made), where="a")
        assert type(arrived) is cls and "it went wrong" in str(arrived)


def test_no_two_errors_have_one_code() -> None:
    with pytest.raises(TypeError, match="needs a code of its own"):

        class Later(DeadlineExceeded):
            pass

    assert type(from_wire(DeadlineExceeded.code, "late")) is DeadlineExceeded
