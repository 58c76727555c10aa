"""Imports the job's modules as the mesh will, in a process of their own with a deadline, and opens
an environment on a sample of the rows.

They are copied first, as into a bundle: what lies beside the job file and is not bundled is not
there on the mesh either.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.mesh.process.entry import child
from meshrl.common.model.chat.messages import conversation_of
from meshrl.job import bundle
from meshrl.job.checks.machine import tokens, trial
from meshrl.job.checks.machine.rows import prompts, texts
from meshrl.job.checks.machine.together import raise_all
from meshrl.job.loaded import JobFile
from meshrl.job.references import all_references
from meshrl.job.rows import TimedRows
from meshrl.job.tasksets import guarded

IMPORT_S = 30.0  # as long as a sandbox lets a worker import
SAMPLED = 64  # rows of a dataset that an environment opens beside its first one
SAMPLE_S = 0.4  # for reading them, and for opening them
QUIET_S = 5.0  # after which somebody who waits is told what for
DUMP_S = 2.0  # for a killed import to say where it was: milliseconds, on a quiet machine
SAID_LINES = 3
GUARD = child.__name__
MEND = "Mend it; --dry-run tries it again"
FRAME = re.compile(r'File "([^"]+)", line (\d+) in')
KINDS = {  # by key, or the table of tools; what is neither is a reward
    "environment.use": "environment",
    "environment": "tool",
    "warm_start.demonstrations": "demonstrations",
}


def imported(job: JobFile, import_s: float = IMPORT_S, quiet_s: float = QUIET_S) -> None:
    """Every function that the job names is there and takes what it will be given."""
    references = [
        {"key": key, "use": use, "kind": KINDS.get(key.partition(".tools.")[0], "reward")}
        for key, use in all_references(job.config)
    ]
    if not references:
        return
    with tempfile.TemporaryDirectory(prefix="meshrl-trial-") as scratch:
        modules = Path(scratch).resolve() / "modules"
        bundle.copy_modules(job.config, job.base, modules)
        raise_all(_shadowing(job, modules))
        asked = {
            "modules": str(modules),
            "references": references,
            "rows": _sample(job) if job.config.environment.use else [],
            "chat": bool(job.config.environment.chat),
            "more_s": SAMPLE_S,
        }
        _Trial(job, modules, import_s, quiet_s).run(asked)


def _shadowing(job: JobFile, modules: Path) -> Iterator[MeshError]:
    """Modules that would be taken for others, or others for them."""
    for path in sorted(modules.iterdir()):
        package = path.is_dir() and (path / "__init__.py").is_file()
        if path.suffix != ".py" and not package:
            continue
        theirs = "MeshRL" if path.stem == "meshrl" else "the standard library"
        if path.stem in {"meshrl", *sys.stdlib_module_names} - {"test"}:
            yield job.fail(
                "",
                f"{job.base / path.name} has the name of a module of {theirs}",
                "Give it another name, here and where it is imported",
            )


def _sample(job: JobFile) -> list[dict[str, Any]]:
    """The first row of each dataset, and then more of them, as far as there is time."""
    read: dict[str, list[dict[str, Any]]] = {key: [] for key, _ in job.datasets}
    for key, row in TimedRows(job.datasets, SAMPLE_S):
        read[key].append({"key": key, "place": row.place, "value": row.value})
    first = [found[0] for found in read.values() if found]
    more = [random.Random(0).sample(f[1:], min(SAMPLED, len(f[1:]))) for f in read.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*more))
    return first + [row | {"more": True} for row in turns if row is not None]


class _Trial:
    def __init__(self, job: JobFile, modules: Path, import_s: float, quiet_s: float) -> None:
        self.job, self.modules = job, modules
        self.import_s, self.quiet_s = import_s, quiet_s
        self.trying, self.key = "", ""
        self.texts = texts.Texts(job)

    def run(self, asked: dict[str, Any]) -> None:
        read, write = os.pipe()
        log, input = self.modules.with_name("said"), self.modules.with_name("asked")
        input.write_text(json.dumps(asked))
        argv, python = [f"module:{trial.__name__}", str(write)], (sys.executable, "-m", GUARD)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        own = {"pass_fds": [write], "start_new_session": True, "env": env}
        try:
            with (
                input.open("rb") as asking,
                guarded(argv, log, python=python, stdin=asking, **own) as process,
            ):
                os.close(write)
                raise_all(self._problems(process, read, log))
        finally:
            os.close(read)

    def _problems(
        self, process: subprocess.Popen[bytes], read: int, log: Path
    ) -> Iterator[MeshError]:
        seen: set[str] = set()  # two functions of a module that does not import say the same
        long: list[MeshError] = []  # of the first dataset that has such prompts
        for line in self._lines(process, read, log):
            if "trying" in line:
                self.trying = line["trying"]
                self.key = self.trying.partition(":")[0]
            elif "opened" in line:
                if not long:
                    yield from (long := list(self._opened(**line["opened"])))
            elif "wrong" in line:
                same = f"{line['wrong']['said']} {line['wrong']['place']}"
                if same not in seen:
                    yield self._wrong(**line["wrong"])
                seen.add(same)
            else:
                yield from self.texts.errors()
                self.texts.tell()
                return
        code = _ended_with(process.pid)
        yield self._hangs(process, log) if code is None else self._ended(code, log)

    def _lines(
        self, process: subprocess.Popen[bytes], read: int, log: Path
    ) -> Iterator[dict[str, Any]]:
        """What the process says, until it ends or says nothing for too long."""
        held, told = b"", False
        since = time.monotonic()
        while True:
            waited = time.monotonic() - since
            left = (self._deadline_s if told else min(self.quiet_s, self._deadline_s)) - waited
            if select.select([read], [], [], max(0.0, left))[0]:
                if not (block := os.read(read, 1 << 16)):
                    return
                *lines, held = (held + block).split(b"\n")
                yield from map(json.loads, lines)
                since, told = time.monotonic(), False
            elif told or self._deadline_s <= self.quiet_s:
                return
            else:
                told = True
                if self.trying:
                    where = self._where(process, log)
                    given_up = f"it is given up after {self._deadline_s:g} s"
                    print(f"{self.trying} takes its time{where}; {given_up}", file=sys.stderr)

    @property
    def _deadline_s(self) -> float:
        opening = "open()" in self.trying
        return self.job.config.environment.step_deadline_s if opening else self.import_s

    def _wrong(self, key: str, said: str, place: str, fix: str, absent: str = "") -> ConfigError:
        said = " / ".join(line.strip() for line in said.splitlines() if line.strip())
        where = f" ({self._shown(place)})" if place else ""
        missing = re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", said)
        if missing and not fix:
            fix = f"Install {missing[1]} where meshrl is installed, or put it beside the job file"
        if absent and self._beside(absent):
            fix = (
                "Only modules are bundled and taken to the mesh: give the file's absolute path, or "
                "put what it says into a module or the rows"
            )
        return self.job.fail(key, f"{key}: {self._shown(said)}{where}", fix or MEND)

    def _opened(self, key: str, place: str, prompt: Any) -> Iterator[MeshError]:
        """A prompt that open() returned: it can be written, and leaves room."""
        said = prompt.get("messages") if isinstance(prompt, dict) else prompt
        try:
            if self.job.config.environment.chat:
                conversation_of(said)
        except ValueError as error:
            wrong = f"open() returned no prompt that a chat takes: {error}, of {place}"
            yield self.job.fail("environment.use", f"environment.use: {wrong}", MEND)
            return
        prompt = said
        try:
            tokenizer = tokens.tokenizer_of(self.job)
            counted = prompts.count_tokens(self.job, key, place, prompts.said(prompt), tokenizer)
            self.texts.look(key, place, [prompts.said(prompt)])
            if counted + 1 > self.job.config.rollout.max_tokens:
                prompts.refuse_long(self.job, key, [(place, counted)], "the prompt has")
        except ConfigError as error:
            yield error

    def _hangs(self, process: subprocess.Popen[bytes], log: Path) -> ConfigError:
        where = self._where(process, log)
        return self.job.fail(
            self.key,
            f"{self.trying} did not end within {self._deadline_s:g} s{where}",
            "Make it faster, or raise environment.step_deadline_s"
            if "open()" in self.trying
            else "Let it work when it is called, not at import",
        )

    def _where(self, process: subprocess.Popen[bytes], log: Path) -> str:
        """Where the process is now, for the end of a message; empty: it does not say."""
        if not self.trying:  # it has not begun
            return ""
        before = log.stat().st_size
        process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + DUMP_S
        while log.stat().st_size == before and time.monotonic() < until:
            time.sleep(0.02)
        with log.open("rb") as file:
            file.seek(before)
            frames = FRAME.findall(file.read().decode(errors="replace"))
        own = [frame for frame in frames if Path(frame[0]).is_relative_to(self.modules)]
        place, line = (own or frames or [("", "")])[0]
        return f": it is at {self._shown(place)}, line {line}" if place else ""

    def _ended(self, code: int, log: Path) -> ConfigError:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-SAID_LINES:])
        return self.job.fail(
            self.key,
            f"{self.trying} ended the process {how}" + (f": {self._shown(last)}" if last else ""),
            MEND,
        )

    def _beside(self, absent: str) -> bool:
        """Whether a file that was not found lies beside the job file."""
        path = Path(absent)
        if path.is_absolute() and not path.is_relative_to(self.modules):
            return False
        path = path.relative_to(self.modules) if path.is_absolute() else path
        return (self.job.base / path).exists()

    def _shown(self, text: str) -> str:
        """With the author's own files in place of their copies."""
        return text.replace(str(self.modules), str(self.job.base))


def _ended_with(pid: int) -> int | None:
    """How a child ended that has closed its pipe, as in `Popen.returncode`; it stays unreaped."""
    until = time.monotonic() + DUMP_S
    while True:
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if how is not None:
            return how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        if time.monotonic() > until:
            return None
        time.sleep(0.01)
