"""Which interpreter runs jailed Python: ours, the one that a job names, or that of its image."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.job.isolation import images
from common.job.isolation.runners import Runner

if TYPE_CHECKING:  # it imports numpy, which would delay each outer jail
    from common.api.sandbox import JailSettings


@dataclass(frozen=True)
class Interpreter:
    """What runs jailed Python."""

    python: str
    isolated: bool  # only the standard library
    places: tuple[str, ...]  # where it and its packages lie
    warm: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # that lie elsewhere, in one directory, to warm if it lacks them
    runner: tuple[str, ...] = ()  # what starts a container for each call, in place of bubblewrap
    root: str = ""  # the file system that it lies in, where that is not the host's

    @classmethod
    def own(cls) -> Interpreter:
        """Ours, without the packages of our environment."""
        base = os.path.realpath(sys.base_prefix)
        python = os.path.join(base, "bin", f"python{sys.version_info.major}")
        return cls(python, True, () if base.startswith("/usr") else (base,))

    def encoded(self) -> str:
        """Return it as an argument of a process, which decodes it."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Interpreter:
        values: dict[str, Any] = json.loads(text)
        for name in ("places", "warm", "packages", "runner"):
            values[name] = tuple(values[name])
        return cls(**values)

    def command(self, code: str) -> list[str]:
        """Return the command that runs `code` with it, apart from the user's settings."""
        return [self.python, *(["-I", "-S"] if self.isolated else ["-I"]), "-c", code]


def interpreter_of(jail: JailSettings) -> Interpreter:
    """Ours, or the one that the job names: with what is installed for it; ConfigError if its image
    or its runner is not to be used.
    """
    runner = tuple(jail.runner)
    if runner:
        Runner(runner).check()
    if runner and not Runner(runner).bundled:
        python = jail.python or "python3"
        return Interpreter(python, False, (), tuple(jail.imports), runner=runner)
    return replace(_here(jail), warm=tuple(jail.imports), runner=runner)


def _here(jail: JailSettings) -> Interpreter:
    """One whose files lie on this host."""
    if jail.root:
        root = images.tree(jail.root)
        return Interpreter(images.python_of(root, jail.python), False, (), root=str(root))
    if not jail.python:
        return Interpreter.own()
    named = Path(jail.python)
    base = _base_of(named)
    places = {str(place) for place in (named.parent.parent, base) if place is not None}
    shown = tuple(sorted(place for place in places if not place.startswith("/usr")))
    return Interpreter(str(named), False, shown)


def _base_of(python: Path) -> Path | None:
    """Where the standard library of a virtual environment's interpreter lies."""
    settings = python.parent.parent / "pyvenv.cfg"
    if not settings.is_file():
        return None
    for line in settings.read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return Path(value.strip()).resolve().parent
    return None
