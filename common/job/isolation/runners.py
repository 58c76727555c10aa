"""A runner: the command of a job that starts a container for each call of the model's code.

Three kinds. `runsc` by name gets the flags that it needs and a bundle. A command with `{bundle}`
and `{id}` is any OCI runtime: it is to run the bundle's container in the foreground. Any other
command is followed by the interpreter and its arguments, and is to run that in a container of its
own, whose Python `sandbox.python` names (`python3` without); it brings its own file system.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.errors import ConfigError

BUNDLE, NAME = "{bundle}", "{id}"
RUNSC = "runsc"
# No network, no control groups of its own (ours bound it from outside), and no layer that could be
# written to.
RUNSC_FLAGS = ("--network=none", "--ignore-cgroups", "--overlay2=none")


@dataclass(frozen=True)
class Runner:
    """A job's `sandbox.runner`."""

    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program's, without where it lies."""
        return os.path.basename(self.command[0])

    @property
    def runsc(self) -> bool:
        """Whether it is gVisor's, whose kernel is its own: it is completed by what that needs."""
        return self.name == RUNSC and not self._template

    @property
    def bundled(self) -> bool:
        """Whether it runs an OCI bundle, which is then made for it."""
        return self.runsc or self._template

    @property
    def _template(self) -> bool:
        return any(BUNDLE in word for word in self.command)

    def check(self) -> None:
        """ConfigError if it cannot be started."""
        if shutil.which(self.command[0]) is None:
            fix = 'docs/sandbox.md, "Runners", says how to install gVisor\'s runsc'
            raise ConfigError(f"there is no program {self.command[0]}", fix=fix)
        if self._template and not any(NAME in word for word in self.command):
            wrong = f"{' '.join(self.command)} takes {BUNDLE}, but no {NAME}"
            raise ConfigError(wrong, fix=f"Name the container by {NAME}")

    def start(self, place: Path, name: str, inside: list[str]) -> list[str]:
        """What starts the container `name`: of the bundle at `place`, or one that runs `inside`."""
        if self.runsc:  # ours come last: of a flag that is given twice, the last counts
            rootless = ["--rootless"] if os.getuid() else []
            flags = [*RUNSC_FLAGS, *rootless, "--root", str(place / "state")]
            return [*self.command, *flags, "run", "--bundle", str(place), name]
        if self._template:
            return [w.replace(BUNDLE, str(place)).replace(NAME, name) for w in self.command]
        return [*(word.replace(NAME, name) for word in self.command), *inside]

    def delete(self, place: Path, name: str) -> list[str]:
        """What removes what a runtime keeps of a container that was killed; empty: there is nothing
        beside its processes and, of runsc, its state at `place`.
        """
        if self._template and "run" in self.command:
            before = self.command[: self.command.index("run")]
            words = [w.replace(BUNDLE, str(place)).replace(NAME, name) for w in before]
            return [*words, "delete", "--force", name]
        return []
