"""One end of the pipe between a solution and its tests: sends operations and answers them.

Plain data crosses by value (`value_codec.py`). Every other object stays on its side and crosses as
a number; the other side has a `RemoteProxy` of it. The side with the tests may apply all of
`OPERATIONS` to the solution's objects. `operations.is_allowed` limits the operations of the
solution on objects of the tests.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import select
import sys
import types
import warnings
from time import monotonic  # tests may replace it
from typing import TYPE_CHECKING, Any, Callable, Coroutine, NoReturn

from ..wire import frames
from . import coroutines, operations, remote_exceptions, value_codec
from .data_proxies import list_overridden, make_data_proxy
from .proxies import RemoteProxy, RemoteRef, get_ref

if TYPE_CHECKING:
    from . import file_sync

ROOT = "/tmp"  # the scratch directory; each jail has its own
_BUILT_IN: tuple[Any, ...] = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    *(types.ModuleType, types.CoroutineType, types.AsyncGeneratorType, types.MappingProxyType),
    *(type, map, filter, zip, enumerate, reversed, type(iter([])), type({}.keys())),
    *(type({}.values()), type({}.items()), property, staticmethod, classmethod, memoryview),
)
KINDS = {kind.__name__: kind for kind in _BUILT_IN}


class NotTransferable(BaseException):
    """Error raised for an operation of the tests that cannot cross jails; it is never a score."""


class ObjectConnection:
    """One end of the pipe; `is_trusted` is true for the end with the tests."""

    def __init__(self, fd: int, is_trusted: bool) -> None:
        self._fd, self.is_trusted = fd, is_trusted
        self._exported: list[Any] = []  # objects that the other side may refer to, by number
        self._export_numbers: dict[int, int] = {}  # by the objects' ids
        self._proxies: dict[int, Any] = {}  # of the other side's objects, by number
        self._request_count = 0
        self.has_used_solution = False  # the tests have requested more than existing objects
        self.has_failed = False  # the other side has raised an error, or sent invalid data
        self.rejection = ""  # the first unsupported operation of the tests
        self.is_rejection_by_solution = False  # an object of the solution has caused it
        self.assertion_types: tuple[type[BaseException], ...] = (AssertionError,)
        # Assertions that failed in callbacks of the tests and did not come back from the solution.
        self.callback_failures: list[BaseException] = []
        self._streams = sys.stdout, sys.stderr  # other streams get the solution's output
        # Called with True when a wait for the other side takes long, and with False at its end.
        self.on_long_wait: Callable[[bool], None] | None = None
        self.unreported_wait_s = 0.0  # remaining wait for the other side before `on_long_wait`
        self._is_wait_reported = self._is_answering = False
        self.wants_warnings = False  # the tests record warnings: send the solution's warnings too
        self.file_sync: file_sync.FileSync | None = None  # if set, send changed files too
        self._shared_containers = value_codec.SharedContainers()
        self.is_closed = False
        self._environment: dict[Any, Any] | None = None

    # -- values

    def create_codec(self) -> value_codec.MessageCodec:
        """Create the codec of one request and its answer."""
        return value_codec.MessageCodec(self._pack, self._unpack)

    def _pack(self, codec: value_codec.MessageCodec, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in value_codec.MUTABLE:
            number = self._shared_containers.get_number(value)
            return None if number is None else ["live", number]
        ref = get_ref(value)
        if ref is not None and ref.connection is self:
            return ["yours", ref.number]
        if isinstance(value, BaseException):
            error, args, text, attributes, cause = remote_exceptions.decompose(value)
            if self.is_trusted:  # omit parts that cannot be passed
                args = tuple(a if isinstance(a, value_codec.DATA) else str(a) for a in args)
                attributes = {}
            fields = (error, args, text, attributes, cause)
            parts = [codec.pack(field, depth + 1) for field in fields]
            return ["error", self.export(value), parts]
        if isinstance(value, type):
            module = str(value.__module__)
            if (
                module in sys.modules
                and (self.is_trusted or operations.is_shared(module, value))
                and operations.find_class(module, value.__qualname__) is value
            ):
                return ["named", module, value.__qualname__]
            if issubclass(value, BaseException) and vars(builtins).get(value.__name__) is not value:
                bases = [codec.pack(base, depth + 1) for base in value.__bases__]
                special = [name for name in remote_exceptions.REMOTE_METHODS if name in vars(value)]
                return ["error class", self.export(value), value.__name__, bases, special]
        if (
            kind is types.ModuleType
            and (self.is_trusted or operations.is_shared(value.__name__, value))
            and operations.find_module(value.__name__) is value
        ):
            return ["module", value.__name__]
        data = value_codec.extract_data(value)
        if data is not None:
            packed_data = codec.pack(data, depth + 1)
            overridden = list_overridden(kind, type(data))
            return ["both", packed_data, self.export(value), kind.__name__, overridden]
        base = next((b.__name__ for b in value_codec.CONTAINER_TYPES if isinstance(value, b)), "")
        if base and self.is_trusted:  # a list of a class of the tests is data to the solution
            return codec.pack(operations.to_builtin(value), depth + 1)
        if self.is_trusted and not operations.can_hand_over(value):
            if self._is_answering:  # the solution requests it: a wrong solution must score zero
                raise TypeError(f"a solution cannot have a {kind.__qualname__} of its tests")
            class_name = f"{kind.__module__}.{kind.__qualname__}"
            self.reject(f"an object of {class_name} handed to the solution")
        compares_by_identity = getattr(kind, "__eq__", None) is object.__eq__
        builtin = kind.__name__ if KINDS.get(kind.__name__) is kind else ""
        return ["mine", self.export(value), kind.__name__, builtin, base, compares_by_identity]

    def _unpack(self, codec: value_codec.MessageCodec, packed: Any, depth: int) -> Any:
        kind, *rest = packed
        if kind == "yours":
            return self._exported[abs(int(rest[0]))]
        if kind == "live":
            return self._shared_containers.get_container(int(rest[0]))
        if kind == "mine":
            number, name, *more = rest
            return self._get_proxy(number, name, lambda ref: _make_proxy(ref, *more))
        if kind == "both":
            data, overridden = codec.unpack(rest[0], depth + 1), tuple(map(str, rest[3]))
            return self._get_proxy(
                rest[1], rest[2], lambda ref: make_data_proxy(data, ref, overridden)
            )
        if kind == "error":
            parts = [codec.unpack(part, depth + 1) for part in rest[1]]
            return self._get_proxy(
                rest[0], "exception", lambda ref: remote_exceptions.rebuild(ref, *parts)
            )
        if kind == "error class":
            name, bases = str(rest[1])[:80], [codec.unpack(b, depth + 1) for b in rest[2]]
            make_class = functools.partial(
                remote_exceptions.make_exception_class,
                name=name,
                bases=bases,
                remote_methods=rest[3],
            )
            return self._get_proxy(rest[0], "type", make_class)
        if kind == "named":
            found = operations.find_class(str(rest[0]), str(rest[1]))
        elif kind == "module":
            found = operations.find_module(str(rest[0]))
        else:
            raise ValueError(f"a value has the unknown kind {kind!r:.40}")
        if found is None or (self.is_trusted and not operations.is_shared(str(rest[0]), found)):
            raise ValueError(f"unknown {kind} {rest[0]!r:.40}")
        return found

    def _get_proxy(self, number: Any, kind: Any, make: Callable[[RemoteRef], Any]) -> Any:
        """Return the proxy of a remote object by its number; `make` creates it the first time."""
        number = int(number)
        if number not in self._proxies:
            self._proxies[number] = make(RemoteRef(self, number, str(kind)[:80]))
        return self._proxies[number]

    def export(self, value: Any) -> int:
        """Return the number by which the other side may refer to an object."""
        number = self._export_numbers.get(id(value))
        if number is None:
            number = self._export_numbers[id(value)] = len(self._exported)
            self._exported.append(value)
        return number

    def reject(self, what: str, by_solution: bool = False) -> NoReturn:
        """Record an unsupported operation and raise; it counts even if the tests catch the error.

        `by_solution`: an object of the solution decides whether this happens, and so the solution
        fails.
        """
        if not self.rejection:
            self.rejection, self.is_rejection_by_solution = what, by_solution
        raise NotTransferable(what)

    # -- requests

    def request(self, operation: str, number: int, *arguments: Any) -> Any:
        """Send an operation and return the answer; the other side's exceptions are raised here."""
        codec = self.create_codec()
        context = {"live": self._shared_containers.collect_changes(codec), **self._build_context()}
        packed = [codec.pack(argument) for argument in arguments]
        self._request_count += 1
        self.has_used_solution = self.has_used_solution or operation not in ("get", "names")
        request_number = self._request_count
        self._send(
            {"do": operation, "to": number, "with": packed, "asked": request_number, **context}
        )
        while True:
            frame = self.receive()
            try:
                if not isinstance(frame, dict):
                    raise ValueError("a frame is not an object")
                if (printed := frame.get("printed")) and self.is_trusted:
                    for stream, text in zip((sys.stdout, sys.stderr), printed):
                        if text:  # it goes to the tests' output
                            stream.write(str(text))
                if "do" not in frame:
                    if frame["asked"] != request_number:
                        raise ValueError("an answer belongs to another request")
                    if self.file_sync is not None and self.is_trusted:
                        self.file_sync.apply_changes(frame.get("files", {}))
                    error, value = self._decode_answer(frame, codec)
                    warned = self.create_codec().unpack(frame.get("warned", ["value", None]))
                    break
            except NotTransferable:
                raise
            except Exception:  # any error of reading invalid data
                self.has_failed = self.is_closed = True
                raise frames.FrameChannelClosed("an invalid answer") from None
            self._answer(frame)
        for warning in warned if self.wants_warnings and warned else ():
            if isinstance(warning, Warning):
                warnings.warn(warning, stacklevel=3)
        if error is not None:
            self.has_failed = True
            self.callback_failures = [f for f in self.callback_failures if f is not error]
            if isinstance(error, StopIteration) and operation != "next" and self.is_trusted:
                raise remote_exceptions.EscapedStopIteration(
                    "the solution has raised StopIteration"
                ) from error
            raise error
        return value

    def _decode_answer(
        self, frame: Any, codec: value_codec.MessageCodec
    ) -> tuple[BaseException | None, Any]:
        """Decode an answer as (raised exception, returned value)."""
        codec.apply_changes(frame.get("changed", []))
        self._shared_containers.apply_changes(frame.get("live", []), codec)
        error = value = None
        if "raised" in frame:
            error = self.create_codec().unpack(frame["raised"])
            if not isinstance(error, BaseException):
                raise ValueError("a raised value is not an exception")
        else:
            value = codec.unpack(frame["value"])
        self._shared_containers.share(
            [(int(n), codec.containers[abs(int(i))]) for i, n in frame.get("held", [])]
        )
        return error, value

    def _send(self, frame: Any) -> None:
        try:
            frames.send(self._fd, frame)
        except frames.FrameChannelClosed:
            self.is_closed = True
            raise

    def _build_context(self) -> dict[str, Any]:
        """Return the state of the tests that an operation needs besides its arguments."""
        if not self.is_trusted:
            return {}
        context: dict[str, Any] = {}
        if (sys.stdout, sys.stderr) != self._streams:
            context["output"] = True
        if self.wants_warnings:
            context["warnings"] = True
        if self.file_sync is not None:
            context["files"] = self.file_sync.collect_changes()
        now = dict(os.environ)
        before = now if self._environment is None else self._environment
        self._environment = now
        changed = {n for n in {*now, *before} if now.get(n) != before.get(n)}
        if changed:
            context["environment"] = {name: now.get(name) for name in changed}
        return context

    def receive(self) -> Any:
        """Return the next frame; frames.FrameChannelClosed.

        A long wait calls `on_long_wait` at its begin and end.
        """
        try:
            before_read = self._wait_readable if self.on_long_wait is not None else None
            return frames.receive(self._fd, before_read)
        except frames.FrameChannelClosed:
            self.is_closed = True
            raise
        finally:
            if self._is_wait_reported and self.on_long_wait is not None:
                self._is_wait_reported = False
                self.on_long_wait(False)

    def _wait_readable(self) -> None:
        """Wait for a frame; call `on_long_wait` if that takes long."""
        if self._is_wait_reported:
            return
        start = monotonic()
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(1000 * max(self.unreported_wait_s, 0.0)):
            assert self.on_long_wait is not None
            self._is_wait_reported = True
            self.on_long_wait(True)
        self.unreported_wait_s -= monotonic() - start

    # -- answers

    def serve(self) -> None:
        """Answer requests until the other side closes the pipe."""
        while True:
            self._answer(frames.receive(self._fd))

    def _answer(self, frame: Any) -> None:
        answer: dict[str, Any] = {}
        codec = self.create_codec()
        warned: list[Any] | None = None
        printed = (
            operations.RecordedOutput() if frame.get("output") and not self.is_trusted else None
        )
        try:
            for name, value in (frame.get("environment") or {}).items():
                if not self.is_trusted:
                    os.environ.pop(name, None)
                    os.environ.update({name: value} if value is not None else {})
            if "files" in frame and not self.is_trusted:
                self.file_sync = self.file_sync or open_file_sync()
                self.file_sync.apply_changes(frame["files"])
            operation = frame["do"]
            target = self._exported[frame["to"]]
            self._shared_containers.apply_changes(frame.get("live", []), codec)
            arguments = [codec.unpack(argument) for argument in frame["with"]]
            if self.is_trusted and not operations.is_allowed(operation, target, arguments):
                kind = AttributeError if operation in ("get", "set", "del") else TypeError
                raise kind(f"a solution may not {operation} what belongs to its tests")
            if self.is_trusted and operation == "await":  # here no other task could run then
                what = "a coroutine of the tests that waits for something"
                arguments = [lambda: self.reject(what)]
            codec.record_states()
            with contextlib.ExitStack() as stack:
                if frame.get("warnings") and not self.is_trusted:
                    warned = stack.enter_context(warnings.catch_warnings(record=True))
                    warnings.simplefilter("always")
                result = operations.OPERATIONS[operation](target, *arguments)
            answer["changed"] = codec.collect_changes()
            answer["live"] = self._shared_containers.collect_changes(codec)
            sent_count = len(codec.containers)
            self._is_answering = True
            answer["value"] = codec.pack(result)
            sent_count = len(codec.containers)
        except (frames.FrameChannelClosed, NotTransferable):
            raise
        except BaseException as error:
            if (
                self.is_trusted
                and isinstance(error, self.assertion_types)
                and get_ref(error) is None
            ):
                self.callback_failures.append(error)
            if "live" not in answer:
                answer["changed"] = codec.collect_changes()
                answer["live"] = self._shared_containers.collect_changes(codec)
                sent_count = len(codec.containers)
            answer["raised"] = self.create_codec().pack(error)
        finally:
            self._is_answering = False
            if printed is not None:
                printed.stop()
        if printed is not None:
            answer["printed"] = printed.read()
        if "files" in frame and self.file_sync is not None and not self.is_trusted:
            answer["files"] = self.file_sync.collect_changes()
        if warned:
            answer["warned"] = self.create_codec().pack([w.message for w in warned])
        if not self.is_trusted:
            indices = [index for index in codec.find_retained() if index < sent_count][
                : value_codec.MAX_SHARED_CONTAINERS
            ]
            retained = [(self.export(codec.containers[index]), index) for index in indices]
            self._shared_containers.share(
                [(number, codec.containers[index]) for number, index in retained]
            )
            answer["held"] = [[index, number] for number, index in retained]
        answer["asked"] = frame.get("asked")
        self._send(answer)


def _make_proxy(
    ref: RemoteRef, builtin: str, base: str, compares_by_identity: bool
) -> RemoteProxy | Coroutine[Any, Any, Any]:
    ref.builtin_class = KINDS.get(builtin)
    ref.builtin_base = next((b for b in value_codec.CONTAINER_TYPES if b.__name__ == base), None)
    ref.compares_by_identity = compares_by_identity is True
    return coroutines.make_remote_coroutine(ref) if builtin == "coroutine" else RemoteProxy(ref)


def open_file_sync() -> file_sync.FileSync:
    """Open the scratch directory; few tests use it, so it is imported only here."""
    from . import file_sync

    return file_sync.FileSync(ROOT)


def serve_solution(fd: int, load: Callable[[], Any]) -> None:
    """Serve the solution's end: load its module as object 0, and run its tests' operations."""
    connection = ObjectConnection(fd, is_trusted=False)
    connection.export(load())
    frames.send(fd, {"ready": True})
    connection.serve()
