"""Import of the job's modules in a process of their own, with a deadline, and trial of rows.

An environment opens a sample of the rows. The modules are copied first, as into a bundle: a file
beside the job file that is not bundled is missing on the mesh too.
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
from meshrl.common.model.chat.messages import extract_text, parse_conversation
from meshrl.job import bundle
from meshrl.job.checks.host import import_probe, tokens
from meshrl.job.checks.host.error_texts import raise_combined
from meshrl.job.checks.host.rows import prompt_lengths, tokenized_texts
from meshrl.job.dataset_rows import TimedRows
from meshrl.job.job_file import JobFile
from meshrl.job.references import find_references
from meshrl.job.tasksets import run_guarded

IMPORT_TIMEOUT_S = 30.0  # as long as a sandbox lets a worker import
SAMPLE_ROWS = 64  # rows of a dataset that an environment opens beside its first one
SAMPLE_TIME_S = 0.4  # for reading them, and for opening them
PROGRESS_NOTICE_S = 5.0  # until a waiting user sees a notice of the current action
DUMP_TIMEOUT_S = 2.0  # for a killed import to dump its position: milliseconds, on a quiet machine
OUTPUT_TAIL_LINES = 3
GUARD_MODULE = child.__name__
DEFAULT_FIX = "Correct the error; `meshrl run --dry-run` checks it again"
FRAME_PATTERN = re.compile(r'File "([^"]+)", line (\d+) in')
REFERENCE_KINDS = {  # by key, or the table of tools; what is neither is a reward
    "environment.use": "environment",
    "environment": "tool",
    "warm_start.demonstrations": "demonstrations",
}


def check_imports(
    job: JobFile,
    import_timeout_s: float = IMPORT_TIMEOUT_S,
    notice_after_s: float = PROGRESS_NOTICE_S,
) -> None:
    """Check that every function that the job names exists and takes its arguments."""
    references = [
        {"key": key, "use": use, "kind": REFERENCE_KINDS.get(key.partition(".tools.")[0], "reward")}
        for key, use in find_references(job.config)
    ]
    if not references:
        return
    with tempfile.TemporaryDirectory(prefix="meshrl-trial-") as scratch:
        modules = Path(scratch).resolve() / "modules"
        bundle.copy_modules(job.config, job.base, modules)
        raise_combined(_find_shadowing_modules(job, modules))
        request = {
            "modules": str(modules),
            "references": references,
            "rows": _sample_rows(job) if job.config.environment.use else [],
            "chat": bool(job.config.environment.chat),
            "more_s": SAMPLE_TIME_S,
        }
        _ImportProbe(job, modules, import_timeout_s, notice_after_s).run(request)


def _find_shadowing_modules(job: JobFile, modules: Path) -> Iterator[MeshError]:
    """Yield errors for modules that hide others, or are hidden by others."""
    for path in sorted(modules.iterdir()):
        package = path.is_dir() and (path / "__init__.py").is_file()
        if path.suffix != ".py" and not package:
            continue
        theirs = "MeshRL" if path.stem == "meshrl" else "the standard library"
        if path.stem in {"meshrl", *sys.stdlib_module_names} - {"test"}:
            yield job.make_error(
                "",
                f"{job.base / path.name} has the same name as a module of {theirs}",
                "Rename the module, and update its imports",
            )


def _sample_rows(job: JobFile) -> list[dict[str, Any]]:
    """Return the first row of each dataset, and further rows while time remains."""
    read: dict[str, list[dict[str, Any]]] = {source.key: [] for source in job.datasets}
    for key, row in TimedRows(job.datasets, SAMPLE_TIME_S):
        read[key].append({"key": key, "location": row.location, "value": row.value})
    first = [found[0] for found in read.values() if found]
    more = [random.Random(0).sample(f[1:], min(SAMPLE_ROWS, len(f[1:]))) for f in read.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*more))
    return first + [row | {"more": True} for row in turns if row is not None]


class _ImportProbe:
    def __init__(
        self, job: JobFile, modules: Path, import_timeout_s: float, notice_after_s: float
    ) -> None:
        self.job, self.modules = job, modules
        self.import_timeout_s, self.notice_after_s = import_timeout_s, notice_after_s
        self.current_action, self.current_key = "", ""
        self.text_problems = tokenized_texts.TextProblems(job)

    def run(self, request: dict[str, Any]) -> None:
        read, write = os.pipe()
        log, input = self.modules.with_name("said"), self.modules.with_name("asked")
        input.write_text(json.dumps(request))
        argv, python = (
            [f"module:{import_probe.__name__}", str(write)],
            (sys.executable, "-m", GUARD_MODULE),
        )
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        own = {"pass_fds": [write], "start_new_session": True, "env": env}
        try:
            with (
                input.open("rb") as input_file,
                run_guarded(argv, log, python=python, stdin=input_file, **own) as process,
            ):
                os.close(write)
                raise_combined(self._collect_errors(process, read, log))
        finally:
            os.close(read)

    def _collect_errors(
        self, process: subprocess.Popen[bytes], read: int, log: Path
    ) -> Iterator[MeshError]:
        reported_ids: set[str] = set()  # two functions of a broken module give the same error
        long: list[MeshError] = []  # of the first dataset that has such prompts
        for line in self._read_messages(process, read, log):
            if "trying" in line:
                self.current_action = line["trying"]
                self.current_key = self.current_action.partition(":")[0]
            elif "opened" in line:
                if not long:
                    yield from (long := list(self._check_prompt(**line["opened"])))
            elif "wrong" in line:
                error_id = f"{line['wrong']['message']} {line['wrong']['location']}"
                if error_id not in reported_ids:
                    yield self._make_import_error(**line["wrong"])
                reported_ids.add(error_id)
            else:
                yield from self.text_problems.make_errors()
                self.text_problems.print_notices()
                return
        code = _wait_exit_status(process.pid)
        yield (
            self._make_timeout_error(process, log)
            if code is None
            else self._make_exit_error(code, log)
        )

    def _read_messages(
        self, process: subprocess.Popen[bytes], read: int, log: Path
    ) -> Iterator[dict[str, Any]]:
        """Yield the process's messages, until it ends or is silent for too long."""
        partial_line, notice_printed = b"", False
        since = time.monotonic()
        while True:
            waited = time.monotonic() - since
            timeout_s = (
                self._timeout_s if notice_printed else min(self.notice_after_s, self._timeout_s)
            ) - waited
            if select.select([read], [], [], max(0.0, timeout_s))[0]:
                if not (block := os.read(read, 1 << 16)):
                    return
                *lines, partial_line = (partial_line + block).split(b"\n")
                yield from map(json.loads, lines)
                since, notice_printed = time.monotonic(), False
            elif notice_printed or self._timeout_s <= self.notice_after_s:
                return
            else:
                notice_printed = True
                if self.current_action:
                    where = self._describe_position(process, log)
                    limit = f"the limit is {self._timeout_s:g} s"
                    print(
                        f"{self.current_action} is still running{where}; {limit}", file=sys.stderr
                    )

    @property
    def _timeout_s(self) -> float:
        opening = "open()" in self.current_action
        return self.job.config.environment.step_deadline_s if opening else self.import_timeout_s

    def _make_import_error(
        self, key: str, message: str, location: str, fix: str, missing_file: str = ""
    ) -> ConfigError:
        message = " / ".join(line.strip() for line in message.splitlines() if line.strip())
        where = f" ({self._map_to_sources(location)})" if location else ""
        missing = re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", message)
        if missing and not fix:
            fix = (
                f"Install {missing[1]} where meshrl is installed, or put the module beside "
                "the job file"
            )
        if missing_file and self._is_beside_job_file(missing_file):
            fix = (
                "Give the file's absolute path, or move its content into a module or the "
                "rows: only modules are copied to the mesh"
            )
        return self.job.make_error(
            key, f"{key}: {self._map_to_sources(message)}{where}", fix or DEFAULT_FIX
        )

    def _check_prompt(self, key: str, location: str, prompt: Any) -> Iterator[MeshError]:
        """Check that a prompt returned by open() can be tokenized and leaves space for a turn."""
        messages = prompt.get("messages") if isinstance(prompt, dict) else prompt
        try:
            if self.job.config.environment.chat:
                parse_conversation(messages)
        except ValueError as error:
            wrong = f"open() returned no valid chat prompt: {error}, for {location}"
            yield self.job.make_error("environment.use", f"environment.use: {wrong}", DEFAULT_FIX)
            return
        prompt = messages
        try:
            tokenizer = tokens.load_job_tokenizer(self.job)
            counted = prompt_lengths.count_tokens(
                self.job, key, location, extract_text(prompt), tokenizer
            )
            self.text_problems.add_row(key, location, [extract_text(prompt)])
            if counted + 1 > prompt_lengths.find_limit(self.job, key)[1]:
                prompt_lengths.raise_too_long(self.job, key, [(location, counted)])
        except ConfigError as error:
            yield error

    def _make_timeout_error(self, process: subprocess.Popen[bytes], log: Path) -> ConfigError:
        where = self._describe_position(process, log)
        return self.job.make_error(
            self.current_key,
            f"{self.current_action} did not finish within {self._timeout_s:g} s{where}",
            "Make open() faster, or raise environment.step_deadline_s"
            if "open()" in self.current_action
            else "Move the work from the import of the module into the function",
        )

    def _describe_position(self, process: subprocess.Popen[bytes], log: Path) -> str:
        """Return the process's current position, for the end of a message; empty: unknown."""
        if not self.current_action:  # the process has not begun
            return ""
        before = log.stat().st_size
        process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + DUMP_TIMEOUT_S
        while log.stat().st_size == before and time.monotonic() < until:
            time.sleep(0.02)
        with log.open("rb") as file:
            file.seek(before)
            frames = FRAME_PATTERN.findall(file.read().decode(errors="replace"))
        own = [frame for frame in frames if Path(frame[0]).is_relative_to(self.modules)]
        place, line = (own or frames or [("", "")])[0]
        return f": the process is at {self._map_to_sources(place)}, line {line}" if place else ""

    def _make_exit_error(self, code: int, log: Path) -> ConfigError:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-OUTPUT_TAIL_LINES:])
        return self.job.make_error(
            self.current_key,
            f"{self.current_action} ended the process {how}"
            + (f": {self._map_to_sources(last)}" if last else ""),
            DEFAULT_FIX,
        )

    def _is_beside_job_file(self, missing_file: str) -> bool:
        """Return True if a file that was not found is beside the job file."""
        path = Path(missing_file)
        if path.is_absolute() and not path.is_relative_to(self.modules):
            return False
        path = path.relative_to(self.modules) if path.is_absolute() else path
        return (self.job.base / path).exists()

    def _map_to_sources(self, text: str) -> str:
        """Replace the paths of copies by the author's own files."""
        return text.replace(str(self.modules), str(self.job.base))


def _wait_exit_status(pid: int) -> int | None:
    """Return a child's status as in `Popen.returncode`, after its pipe closed; do not reap it."""
    until = time.monotonic() + DUMP_TIMEOUT_S
    while True:
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if how is not None:
            return how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        if time.monotonic() > until:
            return None
        time.sleep(0.01)
