"""Container runner of a job: the command that starts a container for each call of the model's code.

There are three kinds. `runsc` by name gets the flags that it needs and a bundle. A command with
`{bundle}` and `{id}` is any OCI runtime, which runs the bundle's container in the foreground. Any
other command is followed by the interpreter and its arguments, and runs these in a container of its
own with its own file system; `sandbox.python` names its Python (default `python3`).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.errors import ConfigError

BUNDLE_PLACEHOLDER, ID_PLACEHOLDER = "{bundle}", "{id}"
RUNSC = "runsc"
# No network, no control groups of its own (ours limit it from outside), and no writable layer.
RUNSC_FLAGS = ("--network=none", "--ignore-cgroups", "--overlay2=none")


@dataclass(frozen=True)
class ContainerRunner:
    """Runner that a job's `sandbox.runner` configures."""

    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the program, without its directory."""
        return os.path.basename(self.command[0])

    @property
    def is_runsc(self) -> bool:
        """True for gVisor's runsc, which has its own kernel: its flags are added here."""
        return self.name == RUNSC and not self._is_template

    @property
    def needs_bundle(self) -> bool:
        """True if it runs an OCI bundle, which is then created for it."""
        return self.is_runsc or self._is_template

    @property
    def _is_template(self) -> bool:
        return any(BUNDLE_PLACEHOLDER in word for word in self.command)

    def check(self) -> None:
        """Raise ConfigError if the runner cannot be started."""
        if shutil.which(self.command[0]) is None:
            fix = 'Install the program: see docs/use/sandbox.md, "Runners"'
            raise ConfigError(f"there is no program {self.command[0]}", fix=fix)
        if self._is_template and not any(ID_PLACEHOLDER in word for word in self.command):
            wrong = f"{' '.join(self.command)} has {BUNDLE_PLACEHOLDER}, but no {ID_PLACEHOLDER}"
            raise ConfigError(wrong, fix=f"Name the container by {ID_PLACEHOLDER}")

    def build_start_command(
        self, bundle_dir: Path, name: str, inner_command: list[str]
    ) -> list[str]:
        """Return the command that starts the container `name`.

        The container is that of the bundle at `bundle_dir`, or one that runs `inner_command`.
        """
        if self.is_runsc:  # our flags come last: the last value of a repeated flag counts
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
        """Return the command that removes a runtime's state of a killed container.

        Empty if there is nothing to remove beside its processes and, for runsc, its state at
        `bundle_dir`.
        """
        if self._is_template and "run" in self.command:
            before = self.command[: self.command.index("run")]
            words = [
                w.replace(BUNDLE_PLACEHOLDER, str(bundle_dir)).replace(ID_PLACEHOLDER, name)
                for w in before
            ]
            return [*words, "delete", "--force", name]
        return []
