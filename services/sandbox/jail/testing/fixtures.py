"""Fixtures: functions whose values tests get as arguments, made once for each scope."""

from __future__ import annotations

import types
from typing import Any, Callable, Iterator

from .marks import ParameterRow

SCOPES = ("session", "package", "module", "class", "function")  # the widest first


class FixtureDefinition:
    """Function decorated with `@pytest.fixture`."""

    def __init__(
        self,
        function: Callable[..., Any],
        scope: Any = "function",
        params: Any = None,
        autouse: bool = False,
        ids: Any = None,
        name: Any = None,
    ) -> None:
        self.function, self.scope, self.autouse = function, scope, autouse
        self.params = [p if isinstance(p, ParameterRow) else ParameterRow(p) for p in params or ()]
        self.name = name or function.__name__
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"fixture {self.name} is called directly")


def fixture(function: Any = None, **options: Any) -> Any:
    """Implement `pytest.fixture`, with and without arguments."""
    if function is not None:
        return FixtureDefinition(function, **options)
    return lambda function: FixtureDefinition(function, **options)


def list_argument_names(function: Any, bound: bool) -> list[str]:
    """Return the arguments that fixtures or parameters must fill.

    Those that have a default, or that decorators of `unittest.mock` fill, are excluded.
    """
    patched = 0
    if patchings := getattr(function, "patchings", ()):
        from unittest import mock

        patched = sum(p.attribute_name is None and p.new is mock.DEFAULT for p in patchings)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    names = names[: len(names) - len(function.__defaults__ or ())]
    only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    keywords = [name for name in only if name not in (function.__kwdefaults__ or {})]
    return [*names[bound + patched :], *keywords]


class FixtureRegistry:
    """Fixtures of a module and its classes, by name."""

    def __init__(self, module: types.ModuleType, builtin: dict[str, Callable[..., Any]]) -> None:
        self.builtin = builtin
        self._module = list(_find_definitions(module.__dict__))

    def named(self, name: str, owner: type[Any] | None) -> list[FixtureDefinition]:
        """Return the definitions of this name, the nearest first."""
        found = [d for d in self.of_class(owner) if d.name == name]
        return found + [d for d in reversed(self._module) if d.name == name]

    def of_class(self, owner: type[Any] | None) -> list[FixtureDefinition]:
        kinds = owner.__mro__ if owner is not None else ()
        return [d for kind in kinds for d in _find_definitions(vars(kind))]

    def automatic(self, owner: type[Any] | None) -> list[str]:
        """Return the names of fixtures that each test of a class, or of the module, uses."""
        found = [d for d in [*self._module, *reversed(self.of_class(owner))] if d.autouse]
        widths = {scope: width for width, scope in enumerate(SCOPES)}
        found.sort(key=lambda definition: widths.get(definition.scope, len(SCOPES)))
        return list(dict.fromkeys(d.name for d in found))

    def needed(self, names: list[str], owner: type[Any] | None) -> Iterator[FixtureDefinition]:
        """Yield the definitions of these names, and of their arguments."""
        seen: set[Any] = set()
        left = list(names)
        while left:
            for definition in self.named(left.pop(0), owner)[:2]:
                if definition not in seen:
                    seen.add(definition)
                    yield definition
                    left += list_argument_names(
                        definition.function, _is_method(definition.function)
                    )


def _find_definitions(namespace: Any) -> Iterator[FixtureDefinition]:
    for value in namespace.values():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, FixtureDefinition):
            yield value


def _is_method(function: Any) -> bool:
    return bool(function.__code__.co_varnames[:1] == ("self",))


class FixtureStore:
    """Values of fixtures in use, by scope, with their finalizers."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Any, Any]] = {scope: {} for scope in SCOPES}
        self._ends: dict[str, list[Callable[[], Any]]] = {scope: [] for scope in SCOPES}

    def at_end(self, scope: str, do: Callable[[], Any]) -> None:
        self._ends[scope].append(do)

    def end(self, scope: str) -> None:
        """Finalize a scope's fixtures, the last first; the first error is raised when all are
        done.
        """
        errors = []
        while self._ends[scope]:
            try:
                self._ends[scope].pop()()
            except BaseException as error:
                errors.append(error)
        self._values[scope].clear()
        if errors:
            raise errors[0]

    def value(self, scope: str, key: Any, make: Callable[[], Any]) -> Any:
        values = self._values[scope]
        if key not in values:
            values[key] = make()
        return values[key]


class FixtureRequest:
    """Fixture `request`: the context of the test that uses a fixture."""

    def __init__(
        self, filling: FixtureResolver, definition: FixtureDefinition | None, scope: str
    ) -> None:
        self._filling, self._definition, self.scope = filling, definition, scope
        item = filling.item
        self.function, self.cls, self.module = item.function, item.owner, item.module
        self.instance, self.node = filling.instance, item
        self.fixturename = definition.name if definition else None
        self.fixturenames = list(item.names)

    @property
    def param(self) -> Any:
        name = self._definition.name if self._definition else ""
        if name not in self._filling.parameters:
            raise AttributeError("this fixture has no parameter")
        return self._filling.parameters[name]

    def getfixturevalue(self, name: str) -> Any:
        return self._filling.value(name)

    def addfinalizer(self, do: Callable[[], Any]) -> None:
        self._filling.store.at_end(self.scope, do)


class FixtureResolver:
    """Resolver of one test's arguments."""

    def __init__(
        self, item: Any, registry: FixtureRegistry, store: FixtureStore, instance: Any
    ) -> None:
        self.item, self.registry, self.store, self.instance = item, registry, store, instance
        self.parameters: dict[str, Any] = item.parameters

    def value(self, name: str, above: FixtureDefinition | None = None) -> Any:
        """Return a fixture's value; with `above`, that of the next definition of the same name."""
        if name == "request":
            return FixtureRequest(self, above, above.scope if above else "function")
        found = self.registry.named(name, self.item.owner)
        if above is not None and above in found:
            found = found[found.index(above) + 1 :]
        if found:
            scope = found[0].scope
            if callable(scope) or scope not in SCOPES:
                scope = "function"
            key = (found[0], repr(self.item.places.get(found[0].name)))
            return self.store.value(scope, key, lambda: self._made(found[0], scope))
        if name in self.item.values:
            return self.item.values[name]
        if make := self.registry.builtin.get(name):
            return self.store.value("function", name, lambda: make(self.store))
        raise LookupError(f"fixture {name!r} not found")

    def _made(self, definition: FixtureDefinition, scope: str) -> Any:
        function = definition.function
        method = _is_method(function)
        given = {}
        for name in list_argument_names(function, method):
            if name == "request":
                given[name] = FixtureRequest(self, definition, scope)
            elif name in self.item.values and name != definition.name:
                given[name] = self.item.values[name]
            else:
                given[name] = self.value(name, definition if name == definition.name else None)
        made = function(*([self.instance] if method else []), **given)
        if isinstance(made, types.GeneratorType) and function.__code__.co_flags & 0x20:
            generator, made = made, next(made)

            def finish() -> None:
                for _ in generator:
                    raise RuntimeError("a fixture has yielded twice")

            self.store.at_end(scope, finish)
        return made
