"""Test of known user mistakes: checks that each gets a clear error message in time.

Usage:

    python -m loadtests.mistakes                    # all, on real meshes
    python -m loadtests.mistakes --only rollout     # those with this in their names
    python -m loadtests.mistakes --list
    python -m loadtests.mistakes --patience 5    # on a machine with five times its work

Prints a line for each and, last, one JSON object: `clear_at_once` is the share of what can be known
before a mesh starts that is said within 3 s (and what the user's own code takes) without one being
started, `clear_within_20s` the share of the rest; `silent` and `destroyed` count.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from loadtests.measuring.commands import Command
from loadtests.measuring.entry import options, print_progress, report
from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import ALL, Mistake, NotPreparedError
from loadtests.mistakes.preparing import PREPARATIONS

SILENT_S = 60.0  # limit for the message
END_S = 60.0  # limit for the command to exit after its message
MESH_ERROR = re.compile(r"^meshrl\.[\w.]*(Error|Failed|Refused|NotFound): ", re.MULTILINE)
STARTED = "starting a mesh"


@dataclass(frozen=True)
class Verdict:
    name: str
    running: bool
    said_s: float | None  # from the start of the command to the complete message; None: never
    by_s: float
    missing: tuple[str, ...]  # expressions that were never found
    faults: tuple[str, ...]  # other errors
    destroyed: tuple[str, ...]  # lost or changed files of the user
    output: str

    @property
    def silent(self) -> bool:
        return self.said_s is None

    @property
    def clear(self) -> bool:
        """Return True if the message came in time and is one that a user can act on."""
        return self.said_s is not None and self.said_s <= self.by_s and not self.faults


class _Trial(Command):
    """Command whose output is searched for messages."""

    def find_patterns(self, patterns: tuple[str, ...]) -> tuple[float | None, tuple[str, ...]]:
        """Return when the last expression was first found (seconds), and those not found yet."""
        latest, missing = 0.0, []
        for pattern in patterns:
            found = (at for at, line in self.lines if re.search(pattern, line, re.IGNORECASE))
            first = next(found, None)
            if first is None:
                missing.append(pattern)
            else:
                latest = max(latest, first)
        return (None if missing else latest), tuple(missing)


class _ScriptTrial(_Trial):
    """The user's own Python program instead of a command of `meshrl`."""

    program_words = ()


def attempt(mistake: Mistake, patience: float = 1.0) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mistake-") as folder:
        place = Place(Path(folder) / "work")
        if mistake.set:
            place.set(mistake.set)
        for name, content in mistake.files.items():
            place.write(name, content)
        if mistake.config:
            place.config(**mistake.config)
        try:
            how, *arguments = mistake.prepare or ("",)
            prepared = PREPARATIONS[how](place, *arguments) if how else None
            with prepared or nullcontext():
                before = place.contents()
                kind = _ScriptTrial if mistake.argv[0].endswith(".py") else _Trial
                command = kind(place.root, *mistake.argv, **mistake.environ)
                try:
                    status = _watch(command, mistake, patience)
                finally:
                    command.end()
                verdict = _judge(mistake, place, before, command, status)
                return replace(verdict, by_s=mistake.by_s * patience)
        except NotPreparedError as error:
            why = (f"not prepared: {error}",)
            return Verdict(mistake.name, mistake.running, None, mistake.by_s, (), why, (), "")


def _watch(command: _Trial, mistake: Mistake, patience: float) -> int | None:
    """Wait until the command exits or cannot be expected to print more; return its exit status or
    None.
    """
    deadline = command.began + (SILENT_S + mistake.own_s) * patience
    while time.monotonic() < deadline:
        status = command.wait(0.1)
        if status is not None:
            return status
        if command.find_patterns(mistake.says)[0] is not None:
            return command.wait(END_S * patience) if mistake.ends else None
    return None


def _judge(
    mistake: Mistake, place: Place, before: dict[str, str], command: _Trial, status: int | None
) -> Verdict:
    said_s, missing = command.find_patterns(mistake.says)
    text = command.text
    faults = []
    is_ours = command.program_words or not MESH_ERROR.search(text)  # a program raises our error
    if "Traceback (most recent call last)" in text and is_ours:
        faults.append("a traceback")
    faults += [f"prints {hidden!r}" for hidden in mistake.hides if hidden in text]
    if not mistake.running and STARTED in text:
        faults.append("a mesh was started")
    if mistake.ends and status in (None, 0):
        faults.append("did not end by itself" if status is None else "exit status 0")
    after = place.contents()
    changed = tuple(
        name
        for name, digest in before.items()
        if after.get(name) != digest and not name.startswith(mistake.changes or ("\0",))
    )
    runs = [name for name in after.keys() - before.keys() if Path(name).parent == Path("runs")]
    if runs and not mistake.running:
        faults.append(f"left {min(runs)}")
    return Verdict(
        name=mistake.name,
        running=mistake.running,
        said_s=None if said_s is None else round(said_s, 2),
        by_s=mistake.by_s,
        missing=missing,
        faults=tuple(faults),
        destroyed=changed,
        output=text[-2000:],
    )


def main() -> int:
    parser = options(
        __doc__,
        only=("", "mistakes with this in their names"),
        jobs=(1, "tried at a time"),
        patience=(1.0, "factor of the time limits, on a loaded machine"),
        out=(Path, "a file for every verdict, as JSON lines"),
        list=(False, "names them and ends"),
    )
    given = parser.parse_args()
    chosen = [mistake for mistake in ALL if given.only in mistake.name]
    twice = [name for name, count in Counter(m.name for m in ALL).items() if count > 1]
    assert not twice, twice
    if given.list:
        print(*(mistake.name for mistake in chosen), sep="\n")
        return 0
    with ThreadPoolExecutor(given.jobs) as pool:
        verdicts = []
        for verdict in pool.map(partial(attempt, patience=given.patience), chosen):
            verdicts.append(verdict)
            print_progress(_format_verdict(verdict))
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
    report(_summary(verdicts))
    return 0 if all(v.clear and not v.destroyed for v in verdicts) else 1


def _format_verdict(verdict: Verdict) -> str:
    when = "never" if verdict.said_s is None else f"{verdict.said_s:.1f} s"
    mark = "ok  " if verdict.clear and not verdict.destroyed else "FAIL"
    wrong = [*(f"not said: {text}" for text in verdict.missing), *verdict.faults]
    wrong += [f"destroyed: {name}" for name in verdict.destroyed[:3]]
    if verdict.said_s is not None and verdict.said_s > verdict.by_s:
        wrong.append(f"late: by {verdict.by_s:g} s")
    return f"{mark} {when:>7} {verdict.name}" + (f" ({'; '.join(wrong)})" if wrong else "")


def _summary(verdicts: list[Verdict]) -> dict[str, object]:
    before = [v for v in verdicts if not v.running]
    running = [v for v in verdicts if v.running]
    return {
        "mistakes": len(verdicts),
        "clear_at_once": _share(before),
        "clear_within_20s": _share(running),
        "silent": sum(v.silent for v in verdicts),
        "destroyed": sum(bool(v.destroyed) for v in verdicts),
        "unclear": [v.name for v in verdicts if not v.clear],
    }


def _share(verdicts: list[Verdict]) -> float | None:
    if not verdicts:
        return None
    return round(sum(v.clear for v in verdicts) / len(verdicts), 3)


if __name__ == "__main__":
    sys.exit(main())
