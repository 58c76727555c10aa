"""Names `solution`, `type`, `isinstance`, `super` for tests, as if the solution were local."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import types
from typing import Any

from ..objects.object_connection import ObjectConnection
from ..objects.proxies import TESTS, RemoteProxy, get_ref
from ..objects.remote_exceptions import EscapedStopIteration
from ..objects.remote_subclasses import resolve_super

NAME = "tests.py"
TYPE_OF_NAME = "__type_of__"
ESCAPED_NAME = "__escaped__"


class SolutionModule(types.ModuleType):
    """Module `solution`: its attributes are the other jail's objects."""

    def __init__(self, side: ObjectConnection) -> None:
        super().__init__("solution")
        self.__dict__["_side"] = side

    def __getattr__(self, name: str) -> Any:
        side = self.__dict__["_side"]
        if name == "__all__":
            return side.ask("names", 0)
        if name.startswith("__") and name not in ("__doc__", "__version__", "__author__"):
            raise AttributeError(name)
        value = side.ask("get", 0, name)
        place = get_ref(value)
        if place is not None:
            place.reached(name, imported=True)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # what an import sets
            self.__dict__[name] = value
        else:
            self.__dict__["_side"].ask("set", 0, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__["_side"].ask("del", 0, name)

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_side"].ask("operator", 0, "__dir__"))


def execute_tests(source: str) -> types.ModuleType:
    """Execute the tests and return their module."""
    module = types.ModuleType(TESTS)
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    tree = ast.fix_missing_locations(_TypeCheckRewriter().visit(ast.parse(source, NAME)))
    own = {"isinstance": is_instance, "issubclass": is_subclass, "callable": is_callable}
    own.update({"super": resolve_super, "vars": get_vars})
    module.__dict__["__builtins__"] = {**vars(builtins), **own}
    module.__dict__.update(
        {TYPE_OF_NAME: get_type, ESCAPED_NAME: EscapedStopIteration, "__file__": NAME}
    )
    sys.modules[TESTS] = module
    exec(compile(tree, NAME, "exec", dont_inherit=True), module.__dict__)
    return module


class _TypeCheckRewriter(ast.NodeTransformer):
    """Rewriter of `type(x)` and `except StopIteration`, which no object can intercept."""

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1:
            node.func = ast.copy_location(ast.Name(TYPE_OF_NAME, ast.Load()), node.func)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        self.generic_visit(node)
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(isinstance(kind, ast.Name) and kind.id == "StopIteration" for kind in kinds):
            found: Any = [*kinds, ast.Name(ESCAPED_NAME, ast.Load())]
            node.type = ast.Tuple(found, ast.Load())
        return node


def get_type(value: Any) -> Any:
    place = get_ref(value)
    if place is None or isinstance(value, (type, BaseException)):
        return type(value)
    return place.ask("kind")


def is_instance(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(is_instance(value, k) for k in kind)
    place = get_ref(value)
    if type(kind) is RemoteProxy or place is None or isinstance(value, BaseException):
        return isinstance(value, kind)
    if type(value) is not RemoteProxy and isinstance(value, kind):
        return True
    if not isinstance(kind, type):
        return isinstance(value, kind)
    known = place.builtin or place.base
    if known is not None and issubclass(known, kind):
        return True
    return kind.__module__ != TESTS and bool(place.ask("is_a", kind))


def is_subclass(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(is_subclass(value, k) for k in kind)
    place = get_ref(value)
    if type(value) is not RemoteProxy or type(kind) is RemoteProxy or not isinstance(kind, type):
        return issubclass(value, kind)
    return kind.__module__ != TESTS and bool(place.ask("is_subclass", kind))


def is_callable(value: Any) -> bool:
    return bool(get_ref(value).ask("callable")) if type(value) is RemoteProxy else callable(value)


def get_vars(*given: Any) -> Any:
    if given and type(given[0]) is RemoteProxy:
        return get_ref(given[0]).ask("get", "__dict__")
    return vars(*given) if given else sys._getframe(1).f_locals
