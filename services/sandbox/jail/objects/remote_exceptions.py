"""Exceptions across two jails: each exception class has an equivalent class on the other side.

So `except`, `isinstance` and the bases of an exception have the same meaning on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .proxies import RemoteRef

MAX_TEXT_CHARACTERS = 2000  # of an exception's text
MAX_CAUSES = 5  # longest chain of causes that crosses


class SolutionError(Exception):
    """Exception of the solution whose class has no equivalent on this side."""


class EscapedStopIteration(RuntimeError):
    """Error raised when the solution's StopIteration leaves a call.

    In `map` or a loop of the tests a StopIteration would end the iteration.
    """


class RemoteExceptionMeta(type):
    """Metaclass of classes that represent exception classes of the other side."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        ref: RemoteRef | None = vars(cls).get("_remote_ref")
        if ref is None:  # the tests have derived it
            return super().__call__(*args, **kwargs)
        return ref.request("call", list(args), kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "_remote_ref":
            raise AttributeError(name)
        ref: RemoteRef = next(
            vars(kind)["_remote_ref"] for kind in cls.__mro__ if "_remote_ref" in vars(kind)
        )
        return ref.request("get", name)


def _get_attribute(self: Any, name: str) -> Any:
    ref: RemoteRef | None = vars(self).get("_remote_ref")
    if ref is None or (name.startswith("__") and name != "__notes__"):
        raise AttributeError(name)
    return ref.request("get", name)


# Methods that a class of exceptions may define for its instances, and their operations.
REMOTE_METHODS = {
    "__len__": "len",
    "__iter__": "iter",
    "__getitem__": "item",
    "__contains__": "in",
    "__bool__": "bool",
    "__repr__": "repr",
    "__hash__": "hash",
    "__eq__": "equal",
}


def make_remote_method(operation: str, *leading: Any) -> Any:
    """Make a method that requests an operation; `leading` arguments precede the call's own."""

    def method(self: Any, *arguments: Any) -> Any:
        ref: RemoteRef = vars(self)["_remote_ref"]
        return ref.request(operation, *leading, *arguments)

    return method


def _is_equal(self: Any, other: Any) -> Any:
    """Compare with another exception by the remote `__eq__`; False for other values."""
    if not isinstance(other, BaseException):
        return False
    ref: RemoteRef = vars(self)["_remote_ref"]
    equal, equals_unknown = ref.request("equal", other)
    return equal is True and equals_unknown is False


def make_exception_class(
    ref: RemoteRef, name: str, bases: list[Any], remote_methods: list[str]
) -> Any:
    """Make a class that represents an exception class of the other side."""
    kinds = [kind for kind in bases if isinstance(kind, type) and issubclass(kind, BaseException)]
    members = {"_remote_ref": ref, "__module__": "solution"}
    members.update({"__getattr__": _get_attribute, "__str__": _format})
    members.update(
        {n: make_remote_method(REMOTE_METHODS[n]) for n in remote_methods if n in REMOTE_METHODS}
    )
    if "__eq__" in remote_methods:
        members.update({"__eq__": _is_equal, "__hash__": make_remote_method("hash")})
    for chosen in (kinds, kinds[:1], [Exception]):
        try:
            return RemoteExceptionMeta(name, tuple(chosen) or (Exception,), members)
        except TypeError:  # their layouts are incompatible
            continue
    raise AssertionError("a class derives from Exception")


def _format(self: Any) -> str:
    text = vars(self).get("_text")
    return str(text) if text is not None else BaseException.__str__(self)


def decompose(error: BaseException) -> list[Any]:
    """Return an exception's class, arguments, text, attributes and cause."""
    try:
        text = str(error)[:MAX_TEXT_CHARACTERS]
    except BaseException:
        text = ""
    attributes = {k: v for k, v in vars(error).items() if not k.startswith("_")}
    cause, depth, last = error.__cause__, 0, error.__cause__
    while last is not None and depth < MAX_CAUSES:
        last, depth = last.__cause__, depth + 1
    return [type(error), error.args, text, attributes, cause if last is None else None]


def rebuild(ref: RemoteRef, kind: Any, args: Any, text: str, attributes: Any, cause: Any) -> Any:
    """Rebuild an exception of the other side from its parts."""
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        kind = SolutionError
    error: Any
    if type(kind) is RemoteExceptionMeta:
        error = BaseException.__new__(kind, *args)  # type: ignore[arg-type]
        error.args = tuple(args)
        error._text = str(text)
    else:
        try:
            error = kind(*args)
        except TypeError:  # its constructor takes other arguments
            error = kind.__new__(kind)
            error.args = tuple(args)
        for name, value in attributes.items():
            if not str(name).startswith("_"):
                setattr(error, str(name), value)
    error._remote_ref = ref
    if isinstance(cause, BaseException):
        error.__cause__ = cause
    return error
