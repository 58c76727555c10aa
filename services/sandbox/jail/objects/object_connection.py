"""One end of the pipe between a solution and its tests: sends operations and answers them.

Plain data crosses by value (`value_codec.py`). Everything else stays where it is and is named by a
number: a `RemoteProxy`. The side with the tests may apply all of `OPERATIONS` to the solution's
objects. `operations.is_allowed` limits what the solution may do to objects of the tests.
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
from typing import Any, Callable

from ..wire import frames
from . import coroutines, operations, remote_exceptions, value_codec
from .data_proxies import list_overridden, make_data_proxy
from .proxies import RemoteProxy, RemoteRef, get_ref

ROOT = "/tmp"  # the scratch directory, where the jails of both sides have their own
_BUILT_IN: tuple[Any, ...] = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    *(types.ModuleType, types.CoroutineType, types.AsyncGeneratorType, types.MappingProxyType),
    *(type, map, filter, zip, enumerate, reversed, type(iter([])), type({}.keys())),
    *(type({}.values()), type({}.items()), property, staticmethod, classmethod, memoryview),
)
KINDS = {kind.__name__: kind for kind in _BUILT_IN}


class NotTransferable(BaseException):
    """Error raised for an operation of the tests that cannot cross jails; never a score of an
    answer.
    """


class ObjectConnection:
    """End of the pipe; `trusted` is the one with the tests."""

    def __init__(self, fd: int, trusted: bool) -> None:
        self._fd, self.trusted = fd, trusted
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._asked = 0
        self.used = False  # the tests have used more than existing objects
        self.failed = False  # the other side has raised an error, or sent invalid data
        self.refused = ""  # the unsupported operation of the tests
        self.provoked = False  # an object of the solution has caused it
        self.assertions: tuple[type[BaseException], ...] = (AssertionError,)
        self.asserted: list[BaseException] = []  # left the tests' callbacks, did not return
        self._streams = sys.stdout, sys.stderr  # other streams get the solution's output
        self.turn: Callable[[bool], None] | None = None  # called when the other side takes long
        self.patience_s = 0.0  # of waiting for the other side, before `turn` is called
        self._told = self._answering = False
        self.wants_warnings = False  # the tests record warnings: the solution's cross too
        self.files: Any = None  # if set, files cross too
        self._live = value_codec.SharedContainers()
        self.closed = False
        self._environment: dict[Any, Any] | None = None

    # -- values

    def message(self) -> value_codec.MessageCodec:
        return value_codec.MessageCodec(self._packed, self._unpacked)

    def _packed(self, message: value_codec.MessageCodec, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in value_codec.MUTABLE:
            number = self._live.number(value)
            return None if number is None else ["live", number]
        place = get_ref(value)
        if place is not None and place.side is self:
            return ["yours", place.number]
        if isinstance(value, BaseException):
            error, args, text, attributes, cause = remote_exceptions.decompose(value)
            if self.trusted:  # parts that cannot be passed are left out
                args = tuple(a if isinstance(a, value_codec.DATA) else str(a) for a in args)
                attributes = {}
            told = (error, args, text, attributes, cause)
            parts = [message.packed(part, depth + 1) for part in told]
            return ["error", self.keep(value), parts]
        if isinstance(value, type):
            module = str(value.__module__)
            if (
                module in sys.modules
                and (self.trusted or operations.is_shared(module, value))
                and operations.find_class(module, value.__qualname__) is value
            ):
                return ["named", module, value.__qualname__]
            if issubclass(value, BaseException) and vars(builtins).get(value.__name__) is not value:
                bases = [message.packed(base, depth + 1) for base in value.__bases__]
                special = [name for name in remote_exceptions.REMOTE_METHODS if name in vars(value)]
                return ["error class", self.keep(value), value.__name__, bases, special]
        if (
            kind is types.ModuleType
            and (self.trusted or operations.is_shared(value.__name__, value))
            and operations.find_module(value.__name__) is value
        ):
            return ["module", value.__name__]
        data = value_codec.extract_data(value)
        if data is not None:
            plain = message.packed(data, depth + 1)
            own = list_overridden(kind, type(data))
            return ["both", plain, self.keep(value), kind.__name__, own]
        base = next((b.__name__ for b in value_codec.CONTAINER_TYPES if isinstance(value, b)), "")
        if base and self.trusted:  # a list of a class of the tests is data to the solution
            return message.packed(operations.to_builtin(value), depth + 1)
        if self.trusted and not operations.can_hand_over(value):
            if self._answering:  # requested by the solution: a wrong one must still score zero
                raise TypeError(f"a solution cannot have a {kind.__qualname__} of its tests")
            named = f"{kind.__module__}.{kind.__qualname__}"
            self.refuse(f"an object of {named} handed to the solution")
        identity = getattr(kind, "__eq__", None) is object.__eq__
        builtin = kind.__name__ if KINDS.get(kind.__name__) is kind else ""
        return ["mine", self.keep(value), kind.__name__, builtin, base, identity]

    def _unpacked(self, message: value_codec.MessageCodec, packed: Any, depth: int) -> Any:
        kind, *rest = packed
        if kind == "yours":
            return self._kept[abs(int(rest[0]))]
        if kind == "live":
            return self._live.container(int(rest[0]))
        if kind == "mine":
            number, name, *more = rest
            return self._remote(number, name, lambda place: _make_proxy(place, *more))
        if kind == "both":
            data, own = message.unpacked(rest[0], depth + 1), tuple(map(str, rest[3]))
            return self._remote(rest[1], rest[2], lambda place: make_data_proxy(data, place, own))
        if kind == "error":
            parts = [message.unpacked(part, depth + 1) for part in rest[1]]
            return self._remote(
                rest[0], "exception", lambda place: remote_exceptions.rebuild(place, *parts)
            )
        if kind == "error class":
            name, bases = str(rest[1])[:80], [message.unpacked(b, depth + 1) for b in rest[2]]
            made = functools.partial(
                remote_exceptions.make_exception_class,
                name=name,
                bases=bases,
                remote_methods=rest[3],
            )
            return self._remote(rest[0], "type", made)
        if kind == "named":
            found = operations.find_class(str(rest[0]), str(rest[1]))
        elif kind == "module":
            found = operations.find_module(str(rest[0]))
        else:
            raise ValueError(f"a value of kind {kind!r:.40}")
        if found is None or (self.trusted and not operations.is_shared(str(rest[0]), found)):
            raise ValueError(f"no {kind} {rest[0]!r:.40}")
        return found

    def _remote(self, number: Any, kind: Any, make: Callable[[RemoteRef], Any]) -> Any:
        """Return the proxy of a remote object by its number; `make` creates it once."""
        number = int(number)
        if number not in self._remotes:
            self._remotes[number] = make(RemoteRef(self, number, str(kind)[:80]))
        return self._remotes[number]

    def keep(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return number

    def refuse(self, what: str, provoked: bool = False) -> None:
        """Record an unsupported operation and raise; it counts even if the tests catch the error.

        `provoked`: an object of the solution decides whether this happens, and so the solution
        fails.
        """
        if not self.refused:
            self.refused, self.provoked = what, provoked
        raise NotTransferable(what)

    # -- requests

    def ask(self, operation: str, number: int, *arguments: Any) -> Any:
        """Send an operation and return the answer; the other side's exceptions are raised here."""
        message = self.message()
        context = {"live": self._live.changes(message), **self._context()}
        sent = [message.packed(argument) for argument in arguments]
        self._asked += 1
        self.used = self.used or operation not in ("get", "names")
        asked = self._asked
        self._send({"do": operation, "to": number, "with": sent, "asked": asked, **context})
        while True:
            frame = self.received()
            try:
                if not isinstance(frame, dict):
                    raise ValueError("a frame that is no object")
                if (printed := frame.get("printed")) and self.trusted:
                    for stream, text in zip((sys.stdout, sys.stderr), printed):
                        if text:  # it goes to the tests' output
                            stream.write(str(text))
                if "do" not in frame:
                    if frame["asked"] != asked:
                        raise ValueError("an answer to something else")
                    if self.files is not None and self.trusted:
                        self.files.change(frame.get("files", {}))
                    error, value = self._heard(frame, message)
                    warned = self.message().unpacked(frame.get("warned", ["value", None]))
                    break
            except NotTransferable:
                raise
            except Exception:  # any error of reading invalid data
                self.failed = self.closed = True
                raise frames.FrameChannelClosed("an answer that is none") from None
            self._answer(frame)
        for warning in warned if self.wants_warnings and warned else ():
            if isinstance(warning, Warning):
                warnings.warn(warning, stacklevel=3)
        if error is not None:
            self.failed = True
            self.asserted = [known for known in self.asserted if known is not error]
            if isinstance(error, StopIteration) and operation != "next" and self.trusted:
                raise remote_exceptions.EscapedStopIteration(
                    "the solution has raised StopIteration"
                ) from error
            raise error
        return value

    def _heard(
        self, frame: Any, message: value_codec.MessageCodec
    ) -> tuple[BaseException | None, Any]:
        """Decode an answer as (raised exception, returned value)."""
        message.change(frame.get("changed", []))
        self._live.change(frame.get("live", []), message)
        error = value = None
        if "raised" in frame:
            error = self.message().unpacked(frame["raised"])
            if not isinstance(error, BaseException):
                raise ValueError("an exception that is none")
        else:
            value = message.unpacked(frame["value"])
        self._live.share(
            [(int(n), message.containers[abs(int(p))]) for p, n in frame.get("held", [])]
        )
        return error, value

    def _send(self, frame: Any) -> None:
        try:
            frames.send(self._fd, frame)
        except frames.FrameChannelClosed:
            self.closed = True
            raise

    def _context(self) -> dict[str, Any]:
        """Return the state that an operation of the tests needs beside its arguments."""
        if not self.trusted:
            return {}
        context: dict[str, Any] = {}
        if (sys.stdout, sys.stderr) != self._streams:
            context["output"] = True
        if self.wants_warnings:
            context["warnings"] = True
        if self.files is not None:
            context["files"] = self.files.changes()
        now = dict(os.environ)
        before = now if self._environment is None else self._environment
        self._environment = now
        changed = {n for n in {*now, *before} if now.get(n) != before.get(n)}
        if changed:
            context["environment"] = {name: now.get(name) for name in changed}
        return context

    def received(self) -> Any:
        """Return the next frame; frames.FrameChannelClosed. A long wait calls `turn` at begin and
        end.
        """
        try:
            return frames.receive(self._fd, self._wait if self.turn is not None else None)
        except frames.FrameChannelClosed:
            self.closed = True
            raise
        finally:
            if self._told and self.turn is not None:
                self._told = False
                self.turn(False)

    def _wait(self) -> None:
        """Wait for a frame; call `turn` if that takes long."""
        if self._told:
            return
        begun = monotonic()
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(1000 * max(self.patience_s, 0.0)):
            assert self.turn is not None
            self._told = True
            self.turn(True)
        self.patience_s -= monotonic() - begun

    # -- answers

    def serve(self) -> None:
        while True:
            self._answer(frames.receive(self._fd))

    def _answer(self, frame: Any) -> None:
        answer: dict[str, Any] = {}
        message = self.message()
        warned: list[Any] | None = None
        printed = operations.RecordedOutput() if frame.get("output") and not self.trusted else None
        try:
            for name, value in (frame.get("environment") or {}).items():
                if not self.trusted:
                    os.environ.pop(name, None)
                    os.environ.update({name: value} if value is not None else {})
            if "files" in frame and not self.trusted:
                self.files = self.files or open_file_sync()
                self.files.change(frame["files"])
            operation = frame["do"]
            target = self._kept[frame["to"]]
            self._live.change(frame.get("live", []), message)
            arguments = [message.unpacked(argument) for argument in frame["with"]]
            if self.trusted and not operations.is_allowed(operation, target, arguments):
                kind = AttributeError if operation in ("get", "set", "del") else TypeError
                raise kind(f"a solution may not {operation} what belongs to its tests")
            if self.trusted and operation == "await":  # here no other task could run then
                what = "a coroutine of the tests that waits for something"
                arguments = [lambda: self.refuse(what)]
            message.remember()
            with contextlib.ExitStack() as stack:
                if frame.get("warnings") and not self.trusted:
                    warned = stack.enter_context(warnings.catch_warnings(record=True))
                    warnings.simplefilter("always")
                found = operations.OPERATIONS[operation](target, *arguments)
            answer["changed"] = message.changed()
            answer["live"] = self._live.changes(message)
            both_know = len(message.containers)
            self._answering = True
            answer["value"] = message.packed(found)
            both_know = len(message.containers)
        except (frames.FrameChannelClosed, NotTransferable):
            raise
        except BaseException as error:
            if self.trusted and isinstance(error, self.assertions) and get_ref(error) is None:
                self.asserted.append(error)
            if "live" not in answer:
                answer["changed"] = message.changed()
                answer["live"] = self._live.changes(message)
                both_know = len(message.containers)
            answer["raised"] = self.message().packed(error)
        finally:
            self._answering = False
            if printed is not None:
                printed.stop()
        if printed is not None:
            answer["printed"] = printed.taken()
        if "files" in frame and self.files is not None and not self.trusted:
            answer["files"] = self.files.changes()
        if warned:
            answer["warned"] = self.message().packed([w.message for w in warned])
        if not self.trusted:
            places = [place for place in message.held() if place < both_know][
                : value_codec.MAX_SHARED_CONTAINERS
            ]
            held = [(self.keep(message.containers[place]), place) for place in places]
            self._live.share([(number, message.containers[place]) for number, place in held])
            answer["held"] = [[place, number] for number, place in held]
        answer["asked"] = frame.get("asked")
        self._send(answer)


def _make_proxy(ref: RemoteRef, builtin: str, base: str, identity: bool) -> Any:
    ref.builtin = KINDS.get(builtin)
    ref.base = next((b for b in value_codec.CONTAINER_TYPES if b.__name__ == base), None)
    ref.identity = identity is True
    return coroutines.make_remote_coroutine(ref) if builtin == "coroutine" else RemoteProxy(ref)


def open_file_sync() -> Any:
    """Open the scratch directory; few tests use it, so few jails pay for the import."""
    from . import file_sync

    return file_sync.FileSync(ROOT)


def serve_solution(fd: int, load: Callable[[], Any]) -> None:
    """Serve the solution's end: load its module as object 0, and run its tests' operations."""
    side = ObjectConnection(fd, trusted=False)
    side.keep(load())
    frames.send(fd, {"ready": True})
    side.serve()
