"""A program that imports a job's modules and tries what they offer; it may be killed.

Standard input: one JSON object, as `modules.py` writes it. Each line that it writes to the
descriptor named by its argument is another: {"trying": what}, {"opened": {...}}, {"wrong": {...}}.
What the author's code prints goes where the process was told to. Only the standard library.
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

Say = Callable[..., None]
CALLED = {  # what a reference is -> its arguments when it is called, its definition, its name
    "environment": ((), "def {name}():", "an environment's factory"),
    "reward": ((None, None), "def {name}(row, turns):", "a reward"),
    "tool": ((None,), "def {name}(input):", "a tool"),
    "demonstrations": (
        (None, 0.0),
        "def {name}(random, progress):",
        "the source of demonstrations",
    ),
}


def main() -> None:
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=False)  # says where it hangs
    out = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)

    def say(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    asked = json.load(sys.stdin)
    sys.path.insert(0, asked["modules"])
    for reference in asked["references"]:
        say(trying=f"{reference['key']}: importing {reference['use']}")
        try:
            found = imported(reference["use"])
            checked(found, reference["use"], reference["kind"])
            if reference["kind"] == "environment":
                opened(found, reference["use"], asked, say)
        except BaseException as error:  # SystemExit at import is the author's mistake, too
            say(wrong={"key": reference["key"], **described(error, asked["modules"])})
    say(done=True)
    out.close()
    os._exit(0)  # threads of the author's modules have no say


class Unfit(Exception):
    """What a reference names cannot be what the job file says it is; `fix` says what could."""

    def __init__(self, wrong: str, fix: str = "", place: str = "", absent: str = "") -> None:
        super().__init__(wrong)
        self.fix, self.place, self.absent = fix, place, absent


def imported(use: str) -> Any:
    module, _, name = use.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        has = ", ".join(sorted(n for n in vars(found) if not n.startswith("_"))) or "nothing"
        raise Unfit(f"{module} has no {name!r}; it has {has}")
    return getattr(found, name)


def checked(found: Any, use: str, kind: str) -> None:
    """Unfit unless it can be called as a `kind` is."""
    name = use.partition(":")[2]
    arguments, definition, what = CALLED[kind]
    fix = f"Define it as `{definition.format(name=name)}`"
    if not callable(found):
        raise Unfit(f"{use} is a {type(found).__name__}, not a function", fix)
    if inspect.iscoroutinefunction(found):
        raise Unfit(f"{use} is async, and is called as a plain function", fix, place_of(found))
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise Unfit(f"{use} cannot be called as {what} is: {error}", fix, place_of(found)) from None
    except ValueError:
        return  # what is not written in Python tells no signature


def place_of(found: Any) -> str:
    code = getattr(inspect.unwrap(found), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else ""


def opened(factory: Any, use: str, asked: dict[str, Any], say: Say) -> None:
    """Opens the first row of each dataset, as the mesh will open all of them, and as many of the
    others as there is time for.
    """
    until = float("inf")
    for row in asked["rows"]:
        if row.get("more"):
            until = min(until, time.monotonic() + asked["more_s"])
            if time.monotonic() > until:
                return
        say(trying=f"environment.use: open() of {row['place']}")
        environment = factory()
        absent = [m for m in ("open", "step") if not callable(getattr(environment, m, None))]
        if absent:
            raise Unfit(
                f"{use} returned a {type(environment).__name__} without {absent[0]}()",
                "A factory returns an object with open(row), step(text), result(value), close()",
                place_of(factory),
            )
        try:
            prompt = environment.open(row["value"])
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}, of {row['place']}"
            missing = error.filename if isinstance(error, FileNotFoundError) else None
            where = place(error, asked["modules"])
            raise Unfit(wrong, place=where, absent=str(missing or "")) from None
        wanted = (str, list, dict) if asked["chat"] else (str,)
        if not isinstance(prompt, wanted):
            raise Unfit(
                f"open() returned {type(prompt).__name__}, not the prompt as str, of "
                f"{row['place']}",
                "Messages take environment.chat"
                if isinstance(prompt, list | dict)
                else "Return text",
                place_of(getattr(environment.open, "__func__", environment.open)),
            )
        try:
            json.dumps(prompt)
        except (TypeError, ValueError) as error:
            wrong = f"open() returned what is no plain data: {error}, of {row['place']}"
            raise Unfit(wrong) from None
        say(opened={"place": row["place"], "key": row["key"], "prompt": prompt})
        if callable(close := getattr(environment, "close", None)):
            close()


def described(error: BaseException, modules: str) -> dict[str, str]:
    """What an exception says, where, and what to do."""
    if isinstance(error, Unfit):
        said = str(error)[:2000]
        return {"said": said, "place": error.place, "fix": error.fix, "absent": error.absent}
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    where, absent = place(error, modules), str(missing or "")
    return {"said": said[:2000], "place": where, "fix": "", "absent": absent}


def place(error: BaseException, modules: str) -> str:
    """The last line of the job's own modules that an exception went through, or else its last."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if f.filename != __file__ and "importlib" not in f.filename]
    own = [f for f in frames if f.filename.startswith(modules + os.sep)]
    return next((f"{f.filename}, line {f.lineno}" for f in reversed(own or frames)), "")


if __name__ == "__main__":
    main()
