"""Collection of a module's tests, in the order in which pytest runs them."""

from __future__ import annotations

import types
from typing import Any, Iterator

from .fixtures import FixtureRegistry, list_argument_names
from .marks import ParameterSet, TestMark, collect_marks, expand_parametrize

FUNCTIONS = (types.FunctionType, staticmethod, classmethod)


class Item:
    """Test: a function or method with one row of its parameters; the fixture `request.node`."""

    def __init__(
        self, name: str, function: Any, owner: type[Any] | None, module: Any, marks: list[TestMark]
    ) -> None:
        self.name, self.function, self.owner, self.module = name, function, owner, module
        self.originalname = getattr(function, "__name__", name)
        self.marks = marks
        self.values: dict[str, Any] = {}
        self.parameters: dict[str, Any] = {}  # of fixtures, by their names
        self.parameter_indices: dict[str, Any] = {}  # see `_expand_fixtures`
        self.fixture_names: list[str] = []  # fixtures and arguments that the test uses
        self.argument_names: list[str] = []  # of the function
        self.is_unittest = False  # a method of a unittest.TestCase

    def get_closest_marker(self, name: str) -> TestMark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def iter_markers(self, name: Any = None) -> Iterator[TestMark]:
        return (mark for mark in self.marks if name in (None, mark.name))


def collect_items(module: types.ModuleType, registry: FixtureRegistry) -> Iterator[Item]:
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            if getattr(value, "__test__", True):
                yield from _make_items(name, value, None, module, registry)
        elif isinstance(value, type) and _is_test_class(name, value):
            yield from _collect_class(name, value, module, registry, ())


def is_unittest_class(value: Any) -> bool:
    """Return whether a class is a `unittest.TestCase`."""
    return any(
        kind.__name__ == "TestCase" and kind.__module__.startswith("unittest")
        for kind in getattr(value, "__mro__", ())
    )


def _is_test_class(name: str, value: type[Any]) -> bool:
    if not getattr(value, "__test__", True) or value.__module__.startswith("unittest"):
        return False
    return is_unittest_class(value) or (
        name.startswith("Test")
        and getattr(value, "__init__", None) is object.__init__
        and getattr(value, "__new__", None) is object.__new__
    )


def _collect_class(
    name: str,
    owner: type[Any],
    module: Any,
    registry: FixtureRegistry,
    outer: tuple[type[Any], ...],
) -> Iterator[Item]:
    if is_unittest_class(owner):
        import unittest

        for part in unittest.TestLoader().getTestCaseNames(owner):
            function = getattr(owner, part)
            marks = collect_marks(function, owner, module)
            item = Item(f"{name}.{part}", function, owner, module, marks)
            item.is_unittest, item.originalname = True, part
            yield item
        return
    indices: dict[str, int] = {}  # in the MRO, of the first class that has the name
    for index, kind in enumerate(owner.__mro__):
        for part in vars(kind):
            indices.setdefault(part, index)
    for part in sorted(indices, key=indices.__getitem__, reverse=True):
        value = vars(owner.__mro__[indices[part]])[part]
        if part.startswith("test") and isinstance(value, FUNCTIONS):
            yield from _make_items(f"{name}.{part}", value, owner, module, registry, outer)
        elif isinstance(value, type) and _is_test_class(part, value):
            yield from _collect_class(f"{name}.{part}", value, module, registry, (owner, *outer))


def _make_items(
    name: str,
    value: Any,
    owner: type[Any] | None,
    module: Any,
    registry: FixtureRegistry,
    outer: tuple[type[Any], ...] = (),
) -> Iterator[Item]:
    function = getattr(value, "__func__", value)
    classes = [owner, *outer] if owner else []
    marks = collect_marks(function, *classes, module)
    bound = owner is not None and not isinstance(value, staticmethod)
    used = [n for mark in marks if mark.name == "usefixtures" for n in mark.args]
    argument_names = list_argument_names(function, bound)
    for case in expand_parametrize(marks):
        names = (*registry.list_autouse(owner), *used, *argument_names)
        fixtures = [n for n in names if n not in case.values]
        for expanded, indices in _expand_fixtures(case, fixtures, owner, registry):
            ids = "-".join(expanded.ids)
            item_name = f"{name}[{ids}]" if ids else name
            item = Item(item_name, value, owner, module, [*expanded.marks, *marks])
            item.values, item.parameters = expanded.values, expanded.indirect
            item.parameter_indices = indices
            item.fixture_names = list(dict.fromkeys([*fixtures, *argument_names]))
            item.argument_names = argument_names
            yield item


def _expand_fixtures(
    case: ParameterSet, names: list[str], owner: type[Any] | None, registry: FixtureRegistry
) -> list[tuple[ParameterSet, dict[str, Any]]]:
    """Return the case with each combination of the parameters of its fixtures.

    Each has the indices of the parameters by fixture, and the values of indirect parameters.
    """
    expanded = [(case, dict(case.indirect))]
    for definition in registry.iter_needed(names, owner):
        if definition.params and definition.name not in case.indirect:
            name = definition.name
            expanded = [
                (before.add_row([name], row, True, str(index)), {**indices, name: index})
                for before, indices in expanded
                for index, row in enumerate(definition.params)
            ]
    return expanded
