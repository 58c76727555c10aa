"""Module `pytest` for tests in a jail: the most used parts of the real one."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import types
from typing import Any, Iterator

from ..objects.object_connection import NotTransferable, ObjectConnection
from ..objects.remote_exceptions import EscapedStopIteration
from ..wire import frames
from .fixtures import FixtureRequest, fixture
from .marks import MarkFactory, ParameterRow
from .patches import CapturedOutput, MonkeyPatch

RELATIVE, ABSOLUTE = 1e-6, 1e-12  # pytest's own


class Skipped(BaseException):
    """Error raised when the test requests to be skipped."""


class ExpectedFailure(BaseException):
    """Error raised when the test declares that it fails."""


class FailedByTest(BaseException):
    """Error of `pytest.fail`: no `except Exception` of a test catches it."""


class ExceptionInfo:
    """Exception caught by `pytest.raises`: `value`, `type`, `match`."""

    value: Any = None

    @property
    def type(self) -> Any:
        return type(self.value)

    @property
    def tb(self) -> Any:
        return self.value.__traceback__

    traceback = tb

    def match(self, pattern: Any) -> bool:
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{str(self.value)!r} does not match {pattern!r}")
        return True

    def exconly(self, tryshort: bool = False) -> str:
        return f"{type(self.value).__name__}: {self.value}"

    def errisinstance(self, kind: Any) -> bool:
        return isinstance(self.value, kind)


class _RaisesContext:
    """Context of `pytest.raises`."""

    def __init__(self, kind: Any, match: Any, check: Any) -> None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        for k in kinds:
            if not (isinstance(k, type) and issubclass(k, BaseException)):
                raise TypeError(f"pytest.raises of {k!r}, which is not an exception")
        self._kinds, self._match, self._check = kinds, match, check

    def __enter__(self) -> ExceptionInfo:
        self._exception_info = ExceptionInfo()
        return self._exception_info

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is None:
            raise FailedByTest(f"did not raise {[k.__name__ for k in self._kinds]}")
        if isinstance(error, (frames.FrameChannelClosed, NotTransferable)):
            return False
        if isinstance(error, EscapedStopIteration) and issubclass(StopIteration, self._kinds):
            error = error.__cause__
        if not isinstance(error, self._kinds):
            return False
        self._exception_info.value = error
        if self._match is not None:
            self._exception_info.match(self._match)
        if self._check is not None and not self._check(error):
            raise AssertionError("the check of pytest.raises has failed")
        return True


def raises(
    expected_exception: Any, *args: Any, match: Any = None, check: Any = None, **kwargs: Any
) -> Any:
    context = _RaisesContext(expected_exception, match, check)
    if not args:
        return context
    function, *arguments = args
    with context as exception_info:
        function(*arguments, **kwargs)
    return exception_info


@contextlib.contextmanager
def warns(kind: Any = Warning, *, match: Any = None) -> Iterator[Any]:
    import warnings

    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield recorded
    matching_kind = [w for w in recorded if issubclass(w.category, kind)]
    if not any(match is None or re.search(match, str(w.message)) for w in matching_kind):
        raise FailedByTest(f"no warning of {kind} that matches {match!r}")


def deprecated_call(*, match: Any = None) -> Any:
    return warns((DeprecationWarning, PendingDeprecationWarning, FutureWarning), match=match)


def _make_raiser(kind: type[BaseException]) -> Any:
    """Make `pytest.skip` and similar functions."""

    def raising(
        reason: str = "", pytrace: bool = True, *, allow_module_level: bool = False
    ) -> None:
        raise kind(reason)

    raising.Exception = kind  # type: ignore[attr-defined]
    return raising


def importorskip(modname: str, minversion: Any = None, reason: Any = None, **_: Any) -> Any:
    try:
        __import__(modname)
    except ImportError as error:
        raise Skipped(str(error)) from None
    return sys.modules[modname]


class Approx:
    """Value equal to what is close to `expected`, a number or a list, tuple or dict of them.

    The solution cannot influence the comparison.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False
    ) -> None:
        self._expected, self._relative = expected, rel
        self._absolute, self._nan_ok = abs, nan_ok

    def __eq__(self, actual: Any) -> bool:
        expected = self._expected
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and expected.keys() == actual.keys()
                and all(self._is_close(expected[key], actual[key]) for key in expected)
            )
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(expected) == len(actual)
                and all(self._is_close(*pair) for pair in zip(expected, actual))
            )
        return self._is_close(expected, actual)

    def _is_close(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, bool) != isinstance(actual, bool):
            return False
        if not _is_number(expected) or not _is_number(actual):
            return bool(expected == actual)
        if expected == actual:
            return True
        if expected != expected:
            return self._nan_ok and actual != actual
        if not isinstance(expected, complex) and math.isinf(expected):
            return False
        exact = type(expected) if type(expected).__name__ == "Decimal" else float
        tolerance = exact(str(ABSOLUTE)) if self._absolute is None else self._absolute
        if self._relative is not None or self._absolute is None:
            relative = exact(str(RELATIVE)) if self._relative is None else self._relative
            tolerance = max(relative * abs(expected), tolerance)
        return bool(abs(expected - actual) <= tolerance)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"


def _is_number(value: Any) -> bool:
    numbers, decimal = sys.modules.get("numbers"), sys.modules.get("decimal")
    if numbers is not None and type(value).__name__ == "Fraction":
        return True
    known = () if decimal is None else (decimal.Decimal,)
    return isinstance(value, (int, float, complex)) or type(value) in known


class _Pytest(types.ModuleType):
    """Module `pytest`; the use of a missing attribute rejects the tests."""

    def __init__(self, connection: ObjectConnection) -> None:
        super().__init__("pytest")
        self.__dict__["_object_connection"] = connection

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        connection: ObjectConnection = self.__dict__["_object_connection"]
        connection.reject(f"pytest.{name}")


def make_pytest_module(connection: ObjectConnection) -> Any:
    """Make the module for the tests of this connection."""
    module: Any = _Pytest(connection)
    for function in (raises, warns, deprecated_call, importorskip, fixture):
        module.__dict__[function.__name__] = function
    for name, kind in (("skip", Skipped), ("xfail", ExpectedFailure), ("fail", FailedByTest)):
        module.__dict__[name] = _make_raiser(kind)
    module.__dict__.update(
        approx=Approx, param=ParameterRow, mark=MarkFactory(), main=lambda *a, **k: 0
    )
    module.__dict__.update(
        MonkeyPatch=MonkeyPatch.for_connection(connection), FixtureRequest=FixtureRequest
    )
    module.__dict__.update(CaptureFixture=_CaptureFixture, ExceptionInfo=ExceptionInfo)
    return module


class _CaptureFixture(CapturedOutput):
    """Type `pytest.CaptureFixture[str]`, for annotations."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls
