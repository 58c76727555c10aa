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

BUNDLE_PLACEHOLDER, ID_PLACEHOLDER = "{bundle}", "{id}"
RUNSC = "runsc"
# No network, no control groups of its own (ours bound it from outside), and no layer that could be
# written to.
RUNSC_FLAGS = ("--network=none", "--ignore-cgroups", "--overlay2=none")


@dataclass(frozen=True)
class ContainerRunner:
    """A job's `sandbox.runner`."""

    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program's, without where it lies."""
        return os.path.basename(self.command[0])

    @property
    def is_runsc(self) -> bool:
        """Whether it is gVisor's, whose kernel is its own: it is completed by what that needs."""
        return self.name == RUNSC and not self._is_template

    @property
    def needs_bundle(self) -> bool:
        """Whether it runs an OCI bundle, which is then made for it."""
        return self.is_runsc or self._is_template

    @property
    def _is_template(self) -> bool:
        return any(BUNDLE_PLACEHOLDER in word for word in self.command)

    def check(self) -> None:
        """ConfigError if it cannot be started."""
        if shutil.which(self.command[0]) is None:
            fix = 'docs/sandbox.md, "Runners", says how to install gVisor\'s runsc'
            raise ConfigError(f"there is no program {self.command[0]}", fix=fix)
        if self._is_template and not any(ID_PLACEHOLDER in word for word in self.command):
            wrong = f"{' '.join(self.command)} takes {BUNDLE_PLACEHOLDER}, but no {ID_PLACEHOLDER}"
            raise ConfigError(wrong, fix=f"Name the container by {ID_PLACEHOLDER}")

    def build_start_command(
        self, bundle_dir: Path, name: str, inner_command: list[str]
    ) -> list[str]:
        """What starts the container `name`: of the bundle at `bundle_dir`, or one that runs
        `inner_command`.
        """
        if self.is_runsc:  # ours come last: of a flag that is given twice, the last counts
            rootless = ["--rootless"] if os.getuid() else []
            flags = [*RUNSC_FLAGS, *rootless, "--root", str(bundle_dir / "state")]
            return [*self.command, *flags, "run", "--bundle", str(bundle_dir), name]
        if self._is_template:
            return [
                w.replace(BUNDLE_PLACEHOLDER, str(bundle_dir)).replace(ID_PLACEHOLDER, name)
                for w in self.command
            ]
        return [*(word.replace(ID_PLACEHOLDER, name) for word in self.command), *inner_command]

    def build_delete_command(self, bundle_dir: Path, name: str) -> list[str]:
        """What removes what a runtime keeps of a container that was killed; empty: there is nothing
        beside its processes and, of runsc, its state at `bundle_dir`.
        """
        if self._is_template and "run" in self.command:
            before = self.command[: self.command.index("run")]
            words = [
                w.replace(BUNDLE_PLACEHOLDER, str(bundle_dir)).replace(ID_PLACEHOLDER, name)
                for w in before
            ]
            return [*words, "delete", "--force", name]
        return []
