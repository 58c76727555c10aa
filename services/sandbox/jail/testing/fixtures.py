"""Fixtures: functions whose values tests receive as arguments, made once for each scope."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Callable, Iterator

from .marks import ParameterRow

if TYPE_CHECKING:
    from .collection import Item

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

    def __init__(
        self, module: types.ModuleType, builtin_fixtures: dict[str, Callable[[FixtureStore], Any]]
    ) -> None:
        self.builtin_fixtures = builtin_fixtures
        self._module_fixtures = list(_find_definitions(module.__dict__))

    def find_by_name(self, name: str, owner: type[Any] | None) -> list[FixtureDefinition]:
        """Return the definitions of this name, the nearest first."""
        of_class = [d for d in self.list_class_fixtures(owner) if d.name == name]
        return of_class + [d for d in reversed(self._module_fixtures) if d.name == name]

    def list_class_fixtures(self, owner: type[Any] | None) -> list[FixtureDefinition]:
        """Return the definitions in a class and its bases."""
        kinds = owner.__mro__ if owner is not None else ()
        return [d for kind in kinds for d in _find_definitions(vars(kind))]

    def list_autouse(self, owner: type[Any] | None) -> list[str]:
        """Return the names of fixtures that each test of a class, or of the module, uses."""
        definitions = [*self._module_fixtures, *reversed(self.list_class_fixtures(owner))]
        definitions = [d for d in definitions if d.autouse]
        widths = {scope: width for width, scope in enumerate(SCOPES)}
        definitions.sort(key=lambda definition: widths.get(definition.scope, len(SCOPES)))
        return list(dict.fromkeys(d.name for d in definitions))

    def iter_needed(self, names: list[str], owner: type[Any] | None) -> Iterator[FixtureDefinition]:
        """Yield the definitions of these names, and of their arguments."""
        visited: set[FixtureDefinition] = set()
        remaining = list(names)
        while remaining:
            for definition in self.find_by_name(remaining.pop(0), owner)[:2]:
                if definition not in visited:
                    visited.add(definition)
                    yield definition
                    remaining += list_argument_names(
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
        self._finalizers: dict[str, list[Callable[[], Any]]] = {scope: [] for scope in SCOPES}

    def add_finalizer(self, scope: str, finalizer: Callable[[], Any]) -> None:
        """Call `finalizer` at the end of a scope."""
        self._finalizers[scope].append(finalizer)

    def tear_down(self, scope: str) -> None:
        """Run a scope's finalizers, the last first; then raise the first error."""
        errors = []
        while self._finalizers[scope]:
            try:
                self._finalizers[scope].pop()()
            except BaseException as error:
                errors.append(error)
        self._values[scope].clear()
        if errors:
            raise errors[0]

    def get_or_make(self, scope: str, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; `make` creates it the first time."""
        values = self._values[scope]
        if key not in values:
            values[key] = make()
        return values[key]


class FixtureRequest:
    """Fixture `request`: the context of the test that uses a fixture."""

    def __init__(
        self, resolver: FixtureResolver, definition: FixtureDefinition | None, scope: str
    ) -> None:
        self._resolver, self._definition, self.scope = resolver, definition, scope
        item = resolver.item
        self.function, self.cls, self.module = item.function, item.owner, item.module
        self.instance, self.node = resolver.instance, item
        self.fixturename = definition.name if definition else None
        self.fixturenames = list(item.fixture_names)

    @property
    def param(self) -> Any:
        name = self._definition.name if self._definition else ""
        if name not in self._resolver.parameters:
            raise AttributeError("this fixture has no parameter")
        return self._resolver.parameters[name]

    def getfixturevalue(self, name: str) -> Any:
        return self._resolver.get_value(name)

    def addfinalizer(self, finalizer: Callable[[], Any]) -> None:
        self._resolver.store.add_finalizer(self.scope, finalizer)


class FixtureResolver:
    """Resolver of one test's arguments."""

    def __init__(
        self, item: Item, registry: FixtureRegistry, store: FixtureStore, instance: Any
    ) -> None:
        self.item, self.registry, self.store, self.instance = item, registry, store, instance
        self.parameters: dict[str, Any] = item.parameters

    def get_value(self, name: str, overriding: FixtureDefinition | None = None) -> Any:
        """Return a fixture's value; with `overriding`, that of the next definition of its name."""
        if name == "request":
            return FixtureRequest(self, overriding, overriding.scope if overriding else "function")
        definitions = self.registry.find_by_name(name, self.item.owner)
        if overriding is not None and overriding in definitions:
            definitions = definitions[definitions.index(overriding) + 1 :]
        if definitions:
            scope = definitions[0].scope
            if callable(scope) or scope not in SCOPES:
                scope = "function"
            key = (definitions[0], repr(self.item.parameter_indices.get(definitions[0].name)))
            return self.store.get_or_make(
                scope, key, lambda: self._make_value(definitions[0], scope)
            )
        if name in self.item.values:
            return self.item.values[name]
        if make := self.registry.builtin_fixtures.get(name):
            return self.store.get_or_make("function", name, lambda: make(self.store))
        raise LookupError(f"fixture {name!r} not found")

    def _make_value(self, definition: FixtureDefinition, scope: str) -> Any:
        function = definition.function
        is_method = _is_method(function)
        arguments = {}
        for name in list_argument_names(function, is_method):
            if name == "request":
                arguments[name] = FixtureRequest(self, definition, scope)
            elif name in self.item.values and name != definition.name:
                arguments[name] = self.item.values[name]
            else:
                arguments[name] = self.get_value(
                    name, definition if name == definition.name else None
                )
        value = function(*([self.instance] if is_method else []), **arguments)
        if isinstance(value, types.GeneratorType) and function.__code__.co_flags & 0x20:
            generator, value = value, next(value)

            def finish() -> None:
                for _ in generator:
                    raise RuntimeError("a fixture has yielded twice")

            self.store.add_finalizer(scope, finish)
        return value
