"""Child process of a run, as its parent sees it: its reports, its output and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import MeshError, from_wire

EXIT_ERROR = 1  # exit status of the module after an error
CHILD_MODULE = "meshrl.scripting.run_process"
OUTPUT_LINES = 1000  # last lines of output that are kept
ERROR_LINES = 5  # of output in the error of a child that reported none
PUMP_TIMEOUT_S = 5.0  # for the last output of a child that has ended


class ChildProcess:
    """Child process that runs a job.

    Its live view appears on a terminal. Elsewhere its lines go through `sys.stdout`, as in a
    notebook, or, unless `is_shown`, only to `output`.
    """

    def __init__(self, arguments: Sequence[str], *, is_shown: bool) -> None:
        self.output: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._is_shown = is_shown
        read, write = os.pipe()
        own_output = sys.stdout if sys.stdout is sys.__stdout__ else None  # no notebook's
        on_terminal = is_shown and own_output is not None and own_output.isatty()
        argv = [sys.executable, "-P", "-m", CHILD_MODULE, str(os.getpid()), str(write), *arguments]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=None if on_terminal else subprocess.PIPE,
                stderr=None if on_terminal else subprocess.STDOUT,
                pass_fds=[write],
                start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
                text=True,
                errors="replace",
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._reports = os.fdopen(read, encoding="utf-8")
        self._pump = threading.Thread(target=self._pump_output, daemon=True)
        self._pump.start()

    @property
    def exit_status(self) -> int | None:
        """Exit status; None while the process runs."""
        return self._process.poll()

    @property
    def has_crashed(self) -> bool:
        """True if the process ended by a signal or an unexpected error, which reports nothing."""
        status = self.exit_status
        return status is not None and (status < 0 or status == EXIT_ERROR)

    def read_directory(self) -> Path:
        """Return the run directory once the mesh has started; raise the error of the start."""
        while line := self._reports.readline():
            message = json.loads(line)
            if "directory" in message:
                return Path(message["directory"])
            self.wait()
            raise _make_error(message["error"])
        self.wait()
        raise self.make_exit_error()

    @cached_property
    def error(self) -> MeshError | None:
        """Error that the process reported at its end, if it did."""
        messages = [json.loads(line) for line in self._reports]
        return next((_make_error(m["error"]) for m in messages if "error" in m), None)

    def make_exit_error(self) -> MeshError:
        """Return the error of a process that ended without a report."""
        last = " / ".join(list(self.output)[-ERROR_LINES:])
        return MeshError(
            f"the process of the run ended with status {self.exit_status}"
            + (f": {last}" if last else "")
        )

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status once the process has ended; None after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout_s)
            self._pump.join(PUMP_TIMEOUT_S)
            return status
        return None

    def stop(self) -> None:
        """Stop the run in order and wait for its end; Ctrl-C kills all its processes at once."""
        self._interrupt()
        try:
            self.wait()
        except KeyboardInterrupt:
            self._interrupt()
            self.wait()
            raise

    def _interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def _pump_output(self) -> None:
        for line in self._process.stdout or ():
            self.output.append(line.rstrip("\n"))
            if self._is_shown:
                with contextlib.suppress(OSError, ValueError):  # the program closed its output
                    print(line, end="", flush=True)


def _make_error(fields: dict[str, Any]) -> MeshError:
    error = from_wire(fields["code"], fields["message"], fields["where"])
    error.fix = fields["fix"]
    return error
