"""Interpreter of jailed Python: ours, the one that a job names, or that of its image.

This module also lists what a jail's root shows of the interpreter, and of the host or image.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.common.job.isolation import images
from meshrl.common.job.isolation.runners import ContainerRunner

if TYPE_CHECKING:  # it imports numpy, which would delay each outer jail
    from meshrl.common.api.sandbox import JailSettings


JAIL_PACKAGE = str(Path(__file__).parents[2] / "jail")  # the package that runs inside
MOUNT_POINT = "/run/meshrl"  # its path in a jail
PACKAGES_MOUNT_POINT = f"{MOUNT_POINT}/packages"  # and packages that the interpreter lacks
HOST_PATHS = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
PRIVATE_DIRECTORIES = (
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
)  # those of an image are hidden: a jail has its own
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


@dataclass(frozen=True)
class Interpreter:
    """Interpreter that runs jailed Python."""

    python: str
    isolated: bool  # only the standard library
    directories: tuple[str, ...]  # directories of the interpreter and its packages
    preloaded_modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # of another directory, to import in advance if it lacks them
    runner: tuple[str, ...] = ()  # starts a container for each call, in place of bubblewrap
    root: str = ""  # the root file system that has it, where that is not the host's

    @classmethod
    def default(cls) -> Interpreter:
        """Our own interpreter, without the packages of our environment."""
        base = os.path.realpath(sys.base_prefix)
        python = os.path.join(base, "bin", f"python{sys.version_info.major}")
        return cls(python, True, () if base.startswith("/usr") else (base,))

    def encode(self) -> str:
        """Encode the interpreter as an argument of a process, which decodes it."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Interpreter:
        given: dict[str, Any] = json.loads(text)
        tuples: dict[str, Any] = {n: tuple(v) for n, v in given.items() if isinstance(v, list)}
        return cls(**given | tuples)

    def build_command(self, code: str) -> list[str]:
        """Return the command that runs `code` with it, without the user's settings."""
        return [self.python, *(["-I", "-S"] if self.isolated else ["-I"]), "-c", code]


def select_interpreter(jail: JailSettings) -> Interpreter:
    """Return our interpreter, or the one that the job names, with its installed packages.

    ConfigError if its image or its runner is unusable.
    """
    runner = tuple(jail.runner)
    if runner:
        ContainerRunner(runner).check()
    if runner and not ContainerRunner(runner).needs_bundle:
        python = jail.python or "python3"
        return Interpreter(python, False, (), tuple(jail.imports), runner=runner)
    return replace(_select_local(jail), preloaded_modules=tuple(jail.imports), runner=runner)


def _select_local(jail: JailSettings) -> Interpreter:
    """Return an interpreter whose files are on this host."""
    if jail.root:
        root = images.find_root(jail.root)
        return Interpreter(images.find_python(root, jail.python), False, (), root=str(root))
    if not jail.python:
        return Interpreter.default()
    python = Path(jail.python)
    home = python.parent.parent
    places = {str(home)}
    if (settings := home / "pyvenv.cfg").is_file():  # its standard library is elsewhere
        pairs = (line.partition("=") for line in settings.read_text().splitlines())
        bases = [value.strip() for key, _, value in pairs if key.strip() == "home"]
        places |= {str(Path(base).resolve().parent) for base in bases[:1]}
    directories = tuple(sorted(place for place in places if not place.startswith("/usr")))
    return Interpreter(str(python), False, directories)


def add_pytest(interpreter: Interpreter) -> Interpreter:
    """Return the interpreter with pytest: its own, or else our packages of pytest alone.

    Where neither has pytest, jails report that.
    """
    specs = [importlib.util.find_spec(name) for name in PYTEST]
    places = [next(iter(s.submodule_search_locations or ()), s.origin or "") for s in specs if s]
    packages = tuple(places) if len(places) == len(PYTEST) and all(places) else interpreter.packages
    return replace(
        interpreter, preloaded_modules=(*interpreter.preloaded_modules, "pytest"), packages=packages
    )


@dataclass(frozen=True)
class RootContent:
    """Content of a root: files and directories by their path inside, and links."""

    binds: dict[str, str]  # inside -> on this host
    links: dict[str, str]  # inside -> content


def list_root_content(interpreter: Interpreter, image: str = "") -> RootContent:
    """Return the content of a root with that interpreter; `image`: its root's path on this host."""
    if interpreter.root:  # each entry at its top: a link there must stay inside
        root, bound_paths = image or interpreter.root, list[str]()
        tops = {
            f"/{n}": os.path.join(root, n)
            for n in sorted(set(os.listdir(root)) - set(PRIVATE_DIRECTORIES))
        }
    else:
        bound_paths = list(filter(os.path.exists, HOST_PATHS))
        tops = {place: place for place in LINKS if os.path.lexists(place)}
    links = {inside: os.readlink(place) for inside, place in tops.items() if os.path.islink(place)}
    binds = {place: place for place in bound_paths}
    binds |= {inside: place for inside, place in tops.items() if inside not in links}
    binds |= {place: place for place in interpreter.directories}  # it may be below one of those
    binds |= {
        f"{PACKAGES_MOUNT_POINT}/{os.path.basename(each)}": each for each in interpreter.packages
    }
    return RootContent({**binds, f"{MOUNT_POINT}/jail": JAIL_PACKAGE}, links)
