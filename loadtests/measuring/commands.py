"""Commands of `meshrl`, run as a user does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from loadtests.measuring.processes import environment

COMMAND_S = 180.0
READ_S = 60.0  # limit for the remaining output of an exited command
STOP_S = 30.0  # for a clean stop after SIGINT


async def meshrl(*words: str, within_s: float = COMMAND_S, **environ: str) -> str:
    """Return a command's output; RuntimeError with it if the command fails."""
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "meshrl", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**environ),
    )
    async with asyncio.timeout(within_s):
        out, err = await command.communicate()
    if command.returncode:
        said = (out + err).decode()
        raise RuntimeError(f"meshrl {' '.join(words)} ends with {command.returncode}: {said}")
    return out.decode()


class Command:
    """A command in a folder, and each line that it prints, with its time."""

    program_words: ClassVar[tuple[str, ...]] = ("-m", "meshrl")  # of Python, before the others

    def __init__(self, folder: Path, *words: str, **environ: str) -> None:
        self.began = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.program = subprocess.Popen(
            [sys.executable, *self.program_words, *words],
            cwd=folder,
            env=environment(COLUMNS="200", **environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            self.lines.append((time.monotonic() - self.began, line))

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def until(self, done: Callable[[], bool], within_s: float) -> bool:
        """Return whether it came to that, before the command ended or the time was over."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if done():
                return True
            if self.program.poll() is not None:
                return done()
            time.sleep(0.05)
        return False

    def wait(self, within_s: float) -> int | None:
        """Return the exit status, once all output is read; None while the command runs."""
        try:
            status = self.program.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(READ_S)
        return status

    def end(self) -> None:
        """Send SIGINT, and SIGKILL where that does not help."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self.program.poll() is None:
                os.killpg(self.program.pid, number)
                self.wait(STOP_S)
