"""Corruption test of every kind of durable file, at rest and under a running mesh.

Usage:

    python -m loadtests.damage --count 20 --seed 1   # twenty, drawn
    python -m loadtests.damage --jobs 2 --out FILE   # all; what FILE has is not tried again
    python -m loadtests.damage --list

Prints a line for each trial and, last, one JSON object: `hung` (no end within 180 s, or no named
failure within 60 s) and `silent` (a traceback, a wrong account, or no message) count and are to
be 0; `recovered` is the share that went on to its last step with an account that is right; the
rest failed by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtests.damage.files import HARMS, KINDS, LAUNCHER, Kind, harm
from loadtests.measuring.commands import Command
from loadtests.measuring.entry import options, print_progress, report
from loadtests.measuring.meshed import living
from loadtests.mistakes.job import JOB, Place, toml
from meshrl.directory.directory_paths import read_json_or_empty

AT_REST, RUNNING = "at rest", "running"
STEPS = 24
OLDER, NEWER = 3, 7  # steps done when the older and the newer copy are made; a checkpoint every two
NAMED_S = 60.0  # by when a failure must be named
ENDS_S = 180.0  # by when a run must have ended, in one way or another
UP_S = 120.0
STEP = re.compile(r"step (\d+)/")
TELLING = (
    "damaged",
    "corrupt",
    "older than",
    "not whole",
    "incomplete",
    "not complete",
    "quarantine",
    "set aside",
)  # kinds of corruption, in a line
SLOW = '''"""A reward that takes its time, so that a run can be met on its way."""

import time


def reward(row, turns):
    time.sleep(0.4)
    said = "".join(turn["text"] for turn in turns if turn["role"] == "model")
    return float(row["answer"] in said)
'''


@dataclass(frozen=True)
class Trial:
    kind: Kind
    how: str
    when: str

    @property
    def name(self) -> str:
        return f"{self.kind.name}: {self.how}, {self.when}"


@dataclass(frozen=True)
class Verdict:
    """Outcome of a trial: recovered, named (a failure that names the file), silent, hung, or
    skipped.
    """

    name: str
    outcome: str
    why: str
    path: str
    ended_s: float  # from the corruption to the end of the command
    status: int | None
    lost: int | None
    trained_twice: int | None
    host_lost: int | None
    said: list[str]  # lines that report the corruption
    output: str


class _Run(Command):
    @property
    def steps(self) -> int:
        """The last step that it has printed; 0 before."""
        return max((int(found) for found in STEP.findall(self.text)), default=0)


class Slot:
    """A folder with a job, one run of it, and copies of that run: one trial at a time."""

    def __init__(self, root: Path) -> None:
        self.place = Place(root / "work")
        self.run = self.place.root / "run"
        self._older, self._newer = root / "older", root / "newer"

    def prepare(self) -> None:
        """Make the run with which every trial starts; RuntimeError with its output if it fails."""
        self.place.write("mine.py", SLOW)
        job = JOB | {
            "out": "run",
            "training": {"checkpoint_every": 2, "keep_checkpoints": 2},
            "budget": {"steps": STEPS},
        }
        self.place.write("job.toml", toml(job))
        for words, steps, copy in (
            (("run", "job.toml"), OLDER, self._older),
            (("resume", "run"), NEWER, self._newer),
        ):
            command = _Run(self.place.root, *words)
            came = command.until(lambda c=command, n=steps: c.steps >= n, UP_S)  # type: ignore[misc]
            command.end()
            if not came or command.steps >= STEPS:
                raise RuntimeError(f"no run to damage:\n{command.text}")
            _copied(self.run, copy)

    def attempt(self, trial: Trial) -> Verdict:
        """Corrupt a file and return the outcome; no process is left running."""
        shutil.rmtree(self.run, ignore_errors=True)
        _copied(self._newer, self.run)
        command: _Run | None = None
        try:
            if trial.when == RUNNING:
                command = _Run(self.place.root, "resume", "run")
                if not command.until(lambda: command.steps > NEWER, UP_S):  # type: ignore[union-attr]
                    return _skipped(trial, f"it does not run:\n{command.text[-1000:]}")
            readers = self._readers(trial.kind, command)
            older = next(iter(trial.kind.found(self._older)), None)
            path = next(iter(trial.kind.found(self.run)), None)
            if path is None:
                return _skipped(trial, "there is no such file")
            if why_not := harm(trial.how, path, older, trial.kind.at_head):
                return _skipped(trial, why_not)
            started_s = time.monotonic()
            before = len(command.lines) if command else 0
            for pid in readers:  # at once: nothing newer must take the place of what was damaged
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if command is not None and LAUNCHER in trial.kind.readers:
                command.wait(10.0)
            if command is None or LAUNCHER in trial.kind.readers:
                command, before = _Run(self.place.root, "resume", "run"), 0
            status = command.wait(ENDS_S)
            ended_s = time.monotonic() - started_s
            return self._judge(
                trial, path, [line for _, line in command.lines[before:]], status, ended_s
            )
        finally:
            if command is not None:
                command.end()

    def _readers(self, kind: Kind, command: Command | None) -> list[int]:
        """Return the pids of the processes that read files of this kind at their next start."""
        if command is None:
            return []
        if LAUNCHER in kind.readers:
            return [command.program.pid]
        url = read_json_or_empty(self.run / "mesh/settings.json").get("redis_url", "")
        found = asyncio.run(living(url))
        pids = [e.pid for e in found if e.name in kind.readers or e.kind in kind.readers]
        if "redis" not in kind.readers:
            return pids
        directory = str(self.run / "mesh" / "redis")
        for process in psutil.process_iter(["pid", "name", "cwd"]):
            name, cwd = process.info["name"] or "", process.info["cwd"] or ""
            if ("redis" in name or "valkey" in name) and cwd.startswith(directory):
                pids.append(process.info["pid"])
        return pids

    def _judge(
        self, trial: Trial, path: Path, lines: list[str], status: int | None, ended_s: float
    ) -> Verdict:
        summary = read_json_or_empty(self.run / "summary.json")
        words = (path.name.lower(), *TELLING)
        said = [line.strip() for line in lines if any(word in line.lower() for word in words)]
        figures = {key: summary.get(key) for key in ("lost", "trained_twice", "host_lost")}
        text = "".join(lines)
        outcome, why = "recovered", ""
        if status is None:
            outcome, why = "hung", f"it runs after {ENDS_S:g} s"
        elif "Traceback (most recent call last)" in text:
            outcome, why = "silent", "a traceback"
        elif status == 0 and (figures["lost"], figures["trained_twice"]) != (0, 0):
            outcome, why = "silent", "exit status 0 with a wrong account"
        elif status == 0 and summary.get("phase") != "finished":
            outcome, why = "silent", "exit status 0, and not finished"
        elif not said and trial.how not in trial.kind.unneeded:
            outcome, why = "silent", "nothing tells of the damage"
        elif status != 0:
            outcome = "named" if ended_s <= NAMED_S else "hung"
            why = said[-1][:300]
        return Verdict(
            name=trial.name,
            outcome=outcome,
            why=why,
            path=str(path.relative_to(self.run)),
            ended_s=round(ended_s, 1),
            status=status,
            said=[line[:300] for line in said[:5]],
            output=text[-3000:],
            **figures,
        )


def _copied(run: Path, to: Path) -> None:

    def sockets(directory: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(directory, name).is_socket()}

    shutil.copytree(run, to, symlinks=True, ignore=sockets)


def _skipped(trial: Trial, why: str) -> Verdict:
    return Verdict(trial.name, "skipped", why, "", 0.0, None, None, None, None, [], "")


ALL = [Trial(kind, how, when) for kind in KINDS for how in HARMS for when in (AT_REST, RUNNING)]


def main() -> int:
    parser = options(
        __doc__,
        only=("", "trials with this in their names"),
        count=(0, "as many, drawn; 0: all"),
        seed=1,
        jobs=(1, "tried at a time"),
        out=(Path, "a file for every verdict, as JSON lines"),
        list=(False, "names them and ends"),
    )
    given = parser.parse_args()
    chosen = [trial for trial in ALL if given.only in trial.name]
    if given.count:
        chosen = random.Random(given.seed).sample(chosen, min(given.count, len(chosen)))
    if given.list:
        print(*(trial.name for trial in chosen), sep="\n")
        return 0
    rows = given.out.read_text().splitlines() if given.out and given.out.is_file() else []
    verdicts: dict[str, dict[str, Any]] = {row["name"]: row for row in map(json.loads, rows)}
    left = [trial for trial in chosen if trial.name not in verdicts]
    for verdict in tried(left, given.jobs):
        verdicts[verdict.name] = asdict(verdict)
        why = f": {verdict.why}" if verdict.why else ""
        about = f"{verdict.name} ({verdict.path}){why}"
        print_progress(f"{verdict.outcome:9} {verdict.ended_s:6.1f} s  {about}")
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    answer = summary([verdicts[trial.name] for trial in chosen])
    report(answer)
    return 0 if not answer["hung"] and not answer["silent"] else 1


def tried(trials: list[Trial], jobs: int) -> Any:
    if not trials:
        return
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        slots: queue.Queue[Slot] = queue.Queue()
        for number in range(min(jobs, len(trials))):
            slot = Slot(Path(folder) / str(number))
            slot.prepare()
            slots.put(slot)

        def attempt(trial: Trial) -> Verdict:
            slot = slots.get()
            try:
                return slot.attempt(trial)
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(attempt, trials)


def summary(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    count = Counter(verdict["outcome"] for verdict in verdicts)
    made = len(verdicts) - count["skipped"]
    return {
        "trials": made,
        "skipped": count["skipped"],
        "hung": count["hung"],
        "silent": count["silent"],
        "named": count["named"],
        "recovered": round(count["recovered"] / made, 3) if made else None,
        "lost": sum(verdict["lost"] or 0 for verdict in verdicts),
        "trained_twice": sum(verdict["trained_twice"] or 0 for verdict in verdicts),
        "wrong": [v["name"] for v in verdicts if v["outcome"] in ("hung", "silent")],
    }


if __name__ == "__main__":
    sys.exit(main())
