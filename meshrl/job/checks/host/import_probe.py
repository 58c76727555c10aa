"""Program that imports a job's modules and tries their functions; it may be killed.

Standard input: one JSON object, as `module_imports.py` writes it. Each line of output to the
descriptor named by its argument is another object: {"trying": what}, {"opened": {...}}, {"wrong":
{...}}. The output of the author's code goes to the process's own output. The program imports little
beyond the standard library.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from meshrl.common.job.bundle.source_locations import find_origin

SendMessage = Callable[..., None]
# what a reference is -> its arguments when it is called, its definition, its name
CALL_SIGNATURES = {
    "environment": ((), "def {name}():", "an environment factory"),
    "reward": ((None, None), "def {name}(row, turns):", "a reward"),
    "tool": ((None,), "def {name}(input):", "a tool"),
    "demonstrations": ((None, 0.0), "def {name}(random, progress):", "a source of demonstrations"),
}


def main() -> None:
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=False)  # dumps where it hangs
    out = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)

    def report(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    request = json.load(sys.stdin)
    sys.path.insert(0, request["modules"])
    for reference in request["references"]:
        report(trying=f"{reference['key']}: importing {reference['use']}")
        try:
            found = import_reference(reference["use"])
            check_callable(found, reference["use"], reference["kind"])
            if reference["kind"] == "environment":
                try_environment(found, reference["use"], request, report)
        except BaseException as error:  # SystemExit at import is the author's mistake, too
            report(wrong={"key": reference["key"], **describe_error(error, request["modules"])})
    report(done=True)
    out.close()
    os._exit(0)  # threads of the author's modules cannot delay the exit


class UnusableReference(Exception):
    """Error raised when a reference does not fit its use in the job file; `fix` says what does."""

    def __init__(
        self, message: str, fix: str = "", location: str = "", missing_file: str = ""
    ) -> None:
        super().__init__(message)
        self.fix, self.location, self.missing_file = fix, location, missing_file


def import_reference(use: str) -> Any:
    module, _, name = use.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        names = ", ".join(sorted(n for n in vars(found) if not n.startswith("_"))) or "nothing"
        raise UnusableReference(f"{module} has no {name!r}; it has {names}")
    return getattr(found, name)


def check_callable(found: Any, use: str, kind: str) -> None:
    """Raise UnusableReference unless the object can be called as a `kind` is."""
    name = use.partition(":")[2]
    arguments, definition, what = CALL_SIGNATURES[kind]
    fix = f"Define it as `{definition.format(name=name)}`"
    if not callable(found):
        raise UnusableReference(f"{use} is of type {type(found).__name__}, not a function", fix)
    if inspect.iscoroutinefunction(found):
        raise UnusableReference(
            f"{use} is async, but MeshRL calls it as a plain function", fix, get_location(found)
        )
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise UnusableReference(
            f"{use} cannot be called as {what}: {error}", fix, get_location(found)
        ) from None
    except ValueError:
        return  # functions that are not written in Python have no signature


def get_location(found: Any) -> str:
    code = getattr(inspect.unwrap(found), "__code__", None)
    return _format_location(code.co_filename, code.co_firstlineno) if code else ""


def _format_location(file: str, line: int) -> str:
    return "{}, line {}".format(*find_origin(file, line))


def try_environment(factory: Any, use: str, request: dict[str, Any], send: SendMessage) -> None:
    """Open the first row of each dataset as the mesh will, then further rows while time remains."""
    until = float("inf")
    for row in request["rows"]:
        if row.get("more"):
            until = min(until, time.monotonic() + request["more_s"])
            if time.monotonic() > until:
                return
        send(trying=f"environment.use: open() of {row['location']}")
        environment = factory()
        absent = [m for m in ("open", "step") if not callable(getattr(environment, m, None))]
        if absent:
            raise UnusableReference(
                f"{use} returned a {type(environment).__name__} without {absent[0]}()",
                "Return an object with open(row), step(text), result(value) and close()",
                get_location(factory),
            )
        try:
            prompt = environment.open(row["value"])
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}, for {row['location']}"
            missing = error.filename if isinstance(error, FileNotFoundError) else None
            where = find_error_location(error, request["modules"])
            raise UnusableReference(
                wrong, location=where, missing_file=str(missing or "")
            ) from None
        prompt_types = (str, list, dict) if request["chat"] else (str,)
        if not isinstance(prompt, prompt_types):
            raise UnusableReference(
                f"open() returned {type(prompt).__name__}, not the prompt as str, for "
                f"{row['location']}",
                "Set environment.chat for prompts of messages"
                if isinstance(prompt, list | dict)
                else "Return the prompt as str",
                get_location(getattr(environment.open, "__func__", environment.open)),
            )
        try:
            json.dumps(prompt)
        except (TypeError, ValueError) as error:
            wrong = (
                f"open() returned a value that is not plain data: {error}, for {row['location']}"
            )
            raise UnusableReference(wrong) from None
        send(opened={"location": row["location"], "key": row["key"], "prompt": prompt})
        if callable(close := getattr(environment, "close", None)):
            close()


def describe_error(error: BaseException, modules: str) -> dict[str, str]:
    """Return the message, place and fix of an exception."""
    if isinstance(error, UnusableReference):
        message = str(error)[:2000]
        return {
            "message": message,
            "location": error.location,
            "fix": error.fix,
            "missing_file": error.missing_file,
        }
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    where, absent = find_error_location(error, modules), str(missing or "")
    return {"message": message[:2000], "location": where, "fix": "", "missing_file": absent}


def find_error_location(error: BaseException, modules: str) -> str:
    """Return the last line of the job's own modules in an exception's trace, or its last line."""
    if isinstance(error, SyntaxError) and error.filename:
        return _format_location(error.filename, error.lineno or 1)
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if f.filename != __file__ and "importlib" not in f.filename]
    own = [f for f in frames if f.filename.startswith(modules + os.sep)]
    return next((_format_location(f.filename, f.lineno or 1) for f in reversed(own or frames)), "")


if __name__ == "__main__":
    main()
