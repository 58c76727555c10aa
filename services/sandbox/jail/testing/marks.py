"""Marks of pytest: `pytest.mark`, `pytest.param`, and their effects on a test."""

from __future__ import annotations

from typing import Any


class TestMark:
    """Mark with its arguments; calling it marks a function or class."""

    def __init__(self, name: str, args: Any = (), kwargs: Any = None) -> None:
        self.name, self.args, self.kwargs = name, tuple(args), dict(kwargs or {})

    @property
    def mark(self) -> TestMark:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(target, type) or (callable(target) and hasattr(target, "__code__")):
            target.pytestmark = [self, *_own_marks(target)]  # type: ignore[union-attr]
            return target
        return TestMark(self.name, (*self.args, *args), {**self.kwargs, **kwargs})

    with_args = __call__


def _own_marks(target: Any) -> list[TestMark]:
    marks = vars(target).get("pytestmark", [])
    return list(marks) if isinstance(marks, (list, tuple)) else [marks]


class MarkFactory:
    """Implementation of `pytest.mark`."""

    def __getattr__(self, name: str) -> TestMark:
        if name.startswith("_"):
            raise AttributeError(name)
        return TestMark(name)


class ParameterRow:
    """Implementation of `pytest.param`: one row of values, its id and marks."""

    def __init__(self, *values: Any, id: Any = None, marks: Any = ()) -> None:
        self.values, self.id = values, id
        self.marks: list[TestMark] = list(marks) if isinstance(marks, (list, tuple)) else [marks]


class ParameterSet:
    """Row of each `parametrize` of a test: values of its arguments and of its fixtures."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.indirect: dict[str, Any] = {}
        self.ids: list[str] = []
        self.marks: list[TestMark] = []

    def add_row(
        self, names: list[str], row: ParameterRow, indirect: Any, row_id: str
    ) -> ParameterSet:
        """Return a copy with the values of one more row."""
        case = ParameterSet()
        case.values, case.indirect = dict(self.values), dict(self.indirect)
        case.ids, case.marks = [*self.ids, row_id], [*self.marks, *row.marks]
        if len(row.values) != len(names):
            raise ValueError(f"parametrize: {len(names)} names and {len(row.values)} values")
        for name, value in zip(names, row.values):
            if indirect is True or (indirect and name in indirect):
                case.indirect[name] = value
            else:
                case.values[name] = value
        return case


def collect_marks(*targets: Any) -> list[TestMark]:
    """Collect the marks of a function, its classes and its module, the nearest first."""
    marks: list[TestMark] = []
    for target in targets:
        if isinstance(target, type):
            marks += (mark for kind in target.__mro__ for mark in _own_marks(kind))
        else:
            marks += reversed(_own_marks(target))
    return marks


def expand_parametrize(marks: list[TestMark]) -> list[ParameterSet]:
    """Return the combinations of rows of the marks."""
    cases = [ParameterSet()]
    for mark in marks:
        if mark.name == "parametrize":
            cases = [
                case for before in cases for case in _expand_rows(before, *mark.args, **mark.kwargs)
            ]
    return cases


def _expand_rows(
    before: ParameterSet,
    argnames: Any,
    argvalues: Any,
    indirect: Any = False,
    ids: Any = None,
    scope: Any = None,
) -> list[ParameterSet]:
    names = argnames.split(",") if isinstance(argnames, str) else argnames
    names = [name.strip() for name in names if name.strip()]
    rows = []
    given_ids = list(ids) if ids is not None and not callable(ids) else None
    for index, values in enumerate(argvalues):
        if not isinstance(values, ParameterRow):
            values = ParameterRow(*(values if len(names) > 1 else (values,)))
        given_id = given_ids[index] if given_ids and not values.id else None
        row_id = values.id or (given_id if given_id is not None else str(index))
        rows.append(before.add_row(names, values, indirect, str(row_id)))
    return rows
