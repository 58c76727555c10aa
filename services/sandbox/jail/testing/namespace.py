"""Names `solution`, `type`, `isinstance`, `super` for tests, as if the solution were local."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import types
from typing import Any

from ..objects.object_connection import ObjectConnection
from ..objects.proxies import TESTS, RemoteProxy, get_own_ref, get_ref
from ..objects.remote_exceptions import EscapedStopIteration
from ..objects.remote_subclasses import resolve_super

NAME = "tests.py"
TYPE_OF_NAME = "__type_of__"
ESCAPED_NAME = "__escaped__"


class SolutionModule(types.ModuleType):
    """Module `solution`: its attributes are the other jail's objects."""

    def __init__(self, connection: ObjectConnection) -> None:
        super().__init__("solution")
        self.__dict__["_object_connection"] = connection

    def __getattr__(self, name: str) -> Any:
        connection = _get_connection(self)
        if name == "__all__":
            return connection.request("names", 0)
        if name.startswith("__") and name not in ("__doc__", "__version__", "__author__"):
            raise AttributeError(name)
        value = connection.request("get", 0, name)
        ref = get_ref(value)
        if ref is not None:
            ref.record_name(name, is_imported=True)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # set by an import
            self.__dict__[name] = value
        else:
            _get_connection(self).request("set", 0, name, value)

    def __delattr__(self, name: str) -> None:
        _get_connection(self).request("del", 0, name)

    def __dir__(self) -> list[str]:
        return list(_get_connection(self).request("operator", 0, "__dir__"))


def _get_connection(module: SolutionModule) -> ObjectConnection:
    connection: ObjectConnection = module.__dict__["_object_connection"]
    return connection


def execute_tests(source: str) -> types.ModuleType:
    """Execute the tests and return their module."""
    module = types.ModuleType(TESTS)
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    tree = ast.fix_missing_locations(_TypeCheckRewriter().visit(ast.parse(source, NAME)))
    replaced = {"isinstance": is_instance, "issubclass": is_subclass, "callable": is_callable}
    replaced.update({"super": resolve_super, "vars": get_vars})
    module.__dict__["__builtins__"] = {**vars(builtins), **replaced}
    module.__dict__.update(
        {TYPE_OF_NAME: get_type, ESCAPED_NAME: EscapedStopIteration, "__file__": NAME}
    )
    sys.modules[TESTS] = module
    exec(compile(tree, NAME, "exec", dont_inherit=True), module.__dict__)
    return module


class _TypeCheckRewriter(ast.NodeTransformer):
    """Rewriter of `type(x)` and `except StopIteration`, which objects cannot intercept."""

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1:
            node.func = ast.copy_location(ast.Name(TYPE_OF_NAME, ast.Load()), node.func)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        self.generic_visit(node)
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(isinstance(kind, ast.Name) and kind.id == "StopIteration" for kind in kinds):
            names: Any = [*kinds, ast.Name(ESCAPED_NAME, ast.Load())]
            node.type = ast.Tuple(names, ast.Load())
        return node


def get_type(value: Any) -> Any:
    ref = get_ref(value)
    if ref is None or isinstance(value, (type, BaseException)):
        return type(value)
    return ref.request("kind")


def is_instance(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(is_instance(value, k) for k in kind)
    ref = get_ref(value)
    if type(kind) is RemoteProxy or ref is None or isinstance(value, BaseException):
        return isinstance(value, kind)
    if type(value) is not RemoteProxy and isinstance(value, kind):
        return True
    if not isinstance(kind, type):
        return isinstance(value, kind)
    known = ref.builtin_class or ref.builtin_base
    if known is not None and issubclass(known, kind):
        return True
    return kind.__module__ != TESTS and bool(ref.request("is_a", kind))


def is_subclass(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(is_subclass(value, k) for k in kind)
    if type(value) is not RemoteProxy or type(kind) is RemoteProxy or not isinstance(kind, type):
        return issubclass(value, kind)
    return kind.__module__ != TESTS and bool(get_own_ref(value).request("is_subclass", kind))


def is_callable(value: Any) -> bool:
    return (
        bool(get_own_ref(value).request("callable"))
        if type(value) is RemoteProxy
        else callable(value)
    )


def get_vars(*arguments: Any) -> Any:
    if arguments and type(arguments[0]) is RemoteProxy:
        return get_own_ref(arguments[0]).request("get", "__dict__")
    return vars(*arguments) if arguments else sys._getframe(1).f_locals
