"""Which interpreter runs jailed Python: ours, the one that a job names, or that of its image; and
what a jail's root shows of it, and of its host or its image what programs need.
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
MOUNT_POINT = "/run/meshrl"  # where it lies in a jail
PACKAGES_MOUNT_POINT = f"{MOUNT_POINT}/packages"  # and packages that the interpreter lacks
HOST_PATHS = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
PRIVATE_DIRECTORIES = (
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
)  # of an image they are not shown: a jail has its own
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


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
    def default(cls) -> Interpreter:
        """Ours, without the packages of our environment."""
        base = os.path.realpath(sys.base_prefix)
        python = os.path.join(base, "bin", f"python{sys.version_info.major}")
        return cls(python, True, () if base.startswith("/usr") else (base,))

    def encode(self) -> str:
        """Return it as an argument of a process, which decodes it."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Interpreter:
        given: dict[str, Any] = json.loads(text)
        tuples: dict[str, Any] = {n: tuple(v) for n, v in given.items() if isinstance(v, list)}
        return cls(**given | tuples)

    def build_command(self, code: str) -> list[str]:
        """Return the command that runs `code` with it, apart from the user's settings."""
        return [self.python, *(["-I", "-S"] if self.isolated else ["-I"]), "-c", code]


def select_interpreter(jail: JailSettings) -> Interpreter:
    """Ours, or the one that the job names: with what is installed for it; ConfigError if its image
    or its runner is not to be used.
    """
    runner = tuple(jail.runner)
    if runner:
        ContainerRunner(runner).check()
    if runner and not ContainerRunner(runner).needs_bundle:
        python = jail.python or "python3"
        return Interpreter(python, False, (), tuple(jail.imports), runner=runner)
    return replace(_select_local(jail), warm=tuple(jail.imports), runner=runner)


def _select_local(jail: JailSettings) -> Interpreter:
    """One whose files lie on this host."""
    if jail.root:
        root = images.find_root(jail.root)
        return Interpreter(images.find_python(root, jail.python), False, (), root=str(root))
    if not jail.python:
        return Interpreter.default()
    python = Path(jail.python)
    home = python.parent.parent
    places = {str(home)}
    if (settings := home / "pyvenv.cfg").is_file():  # its standard library lies elsewhere
        pairs = (line.partition("=") for line in settings.read_text().splitlines())
        bases = [value.strip() for key, _, value in pairs if key.strip() == "home"]
        places |= {str(Path(base).resolve().parent) for base in bases[:1]}
    shown = tuple(sorted(place for place in places if not place.startswith("/usr")))
    return Interpreter(str(python), False, shown)


def add_pytest(interpreter: Interpreter) -> Interpreter:
    """The same one with pytest imported: its own, or else the packages of ours alone. Where neither
    has it, jails say so.
    """
    specs = [importlib.util.find_spec(name) for name in PYTEST]
    places = [next(iter(s.submodule_search_locations or ()), s.origin or "") for s in specs if s]
    packages = tuple(places) if len(places) == len(PYTEST) and all(places) else interpreter.packages
    return replace(interpreter, warm=(*interpreter.warm, "pytest"), packages=packages)


@dataclass(frozen=True)
class RootContent:
    """What lies in the root: files and directories by their place inside, and links."""

    binds: dict[str, str]  # inside -> on this host
    links: dict[str, str]  # inside -> what it says


def list_root_content(interpreter: Interpreter, image: str = "") -> RootContent:
    """Return the content of a root with that interpreter; `image`: where its root lies here."""
    if interpreter.root:  # each thing at its top: a link there may lead nowhere but inside
        root, shown = image or interpreter.root, list[str]()
        tops = {
            f"/{n}": os.path.join(root, n)
            for n in sorted(set(os.listdir(root)) - set(PRIVATE_DIRECTORIES))
        }
    else:
        shown = list(filter(os.path.exists, HOST_PATHS))
        tops = {place: place for place in LINKS if os.path.lexists(place)}
    links = {inside: os.readlink(place) for inside, place in tops.items() if os.path.islink(place)}
    binds = {place: place for place in shown}
    binds |= {inside: place for inside, place in tops.items() if inside not in links}
    binds |= {place: place for place in interpreter.places}  # it may lie below one of those
    binds |= {
        f"{PACKAGES_MOUNT_POINT}/{os.path.basename(each)}": each for each in interpreter.packages
    }
    return RootContent({**binds, f"{MOUNT_POINT}/jail": JAIL_PACKAGE}, links)
