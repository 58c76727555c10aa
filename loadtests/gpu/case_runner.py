"""Runner of cases in processes of their own: one that fails, hangs or dies loses its row only.

The processes are forks of a server that has imported torch and never touches CUDA. A part's cases
share a process. After a failure, whose CUDA context may be broken, the others get a new one.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

from loadtests.gpu.plan import Case, Figures, Incorrect, NoGpu, Settings, Skipped, allot_deadline_s

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
EXIT_S = 15.0  # for a process whose cases are over
MAX_REASON_CHARS = 400


@dataclass(frozen=True)
class Outcome:
    """Row of the result."""

    case: Case
    state: str  # passed | failed | skipped
    seconds: float
    figures: Figures = field(default_factory=dict)
    reason: str = ""


@dataclass
class CaseRunner:
    """Runner of cases in order, within a total time."""

    settings: Settings
    total_s: float
    package: str = "loadtests.gpu.parts"  # its module of a part's name has `CASES`
    preload: tuple[str, ...] = ("torch", "torch._dynamo")  # neither calls CUDA when imported

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """Yield the outcome of each case when it is over."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self.preload))
        end = time.monotonic() + self.total_s
        waiting = list(cases)
        for part, group in groupby(cases, key=lambda case: case.part):
            count = len(list(group))
            while count:
                for outcome in self._run_process(context, part, waiting[:count], waiting, end):
                    waiting.pop(0)
                    count -= 1
                    yield outcome

    def _run_process(
        self, context: Any, part: str, own: Sequence[Case], waiting: Sequence[Case], end: float
    ) -> Iterator[Outcome]:
        """Run cases of a part in one process, up to the first that fails."""
        ours, theirs = context.Pipe()
        process = context.Process(target=run_part, args=(f"{self.package}.{part}", theirs))
        process.start()
        theirs.close()
        continues = True
        try:
            for case in own:
                settings = replace(
                    self.settings, deadline_s=allot_deadline_s(waiting, end - time.monotonic())
                )
                outcome, continues = _run_case(case, process, ours, settings)
                yield outcome
                if not continues:
                    return
        finally:
            ours.close()  # ends a process that waits for a case
            process.join(EXIT_S if continues else 0)
            kill_group(process)


def _run_case(
    case: Case, process: Any, connection: Connection, settings: Settings
) -> tuple[Outcome, bool]:
    """Wait for a case's result, the end of its process, or its deadline.

    Return the outcome, and True if the process can run the next case.
    """
    began, deadline_s = time.monotonic(), settings.deadline_s
    try:
        connection.send((case.name, settings))
        if not connection.poll(deadline_s):
            reason = f"it took more than {deadline_s:.0f} s"
            return Outcome(case, FAILED, deadline_s, reason=reason), False
        state, figures, reason, continues = connection.recv()
    except (EOFError, ConnectionError):
        process.join(EXIT_S)
        state, figures, continues = FAILED, {}, False
        reason = describe_exit(process.exitcode)
    return Outcome(case, state, time.monotonic() - began, figures, reason), continues


def describe_exit(code: int | None) -> str:
    """Return how a process ended without a result."""
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with status {code} and no result"


def kill_group(process: Any) -> None:
    """Kill a process and all in its group; return when it has ended."""
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(EXIT_S)


def run_part(name: str, connection: Connection) -> None:
    """Run cases of a module as they are requested, up to an error that may harm the next.

    Each answer is a state with figures and a reason, and True if the process can continue.
    """
    os.setpgrp()
    with contextlib.suppress(EOFError):
        continues = True
        while continues:
            case_name, settings = connection.recv()
            *answer, continues = run_case(name, case_name, settings)
            connection.send((*answer, continues))
    close = getattr(sys.modules.get(name), "close", None)
    if close is not None:
        close()


def run_case(
    module_name: str, case_name: str, settings: Settings
) -> tuple[str, Figures, str, bool]:
    """Run a case of a module; return the answer of `run_part`."""
    continues = False
    try:
        module = importlib.import_module(module_name)
        continues = getattr(module, "CONTINUES_AFTER_ERRORS", False)
        return PASSED, module.CASES[case_name](settings), "", True
    except Skipped as skipped:
        return SKIPPED, {}, str(skipped), True
    except Exception as error:  # any of a library, a driver or a device
        if not isinstance(error, Incorrect | NoGpu):
            traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
        return FAILED, {}, reason, continues
