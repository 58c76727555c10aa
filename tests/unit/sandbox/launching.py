"""Jails and programs for tests: launchers, an image, processes as another user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.isolation.resources.cgroups import CgroupParents
from tests.load import scaled


@contextlib.asynccontextmanager
async def launching(
    log: Path | None = None,
    *,
    tier: str = "bwrap",
    interpreter: Interpreter | None = None,
    homes: CgroupParents | None = None,
) -> AsyncIterator[JailLauncher]:
    """One that is stopped in the end."""
    own = interpreter or Interpreter.default()
    made = JailLauncher(SystemHost(), SystemClock(), tier, own, homes, log)
    try:
        yield made
    finally:
        await made.stop()


ROOT = Path(__file__).parents[3]
PLAIN = ("-m", "tests.unit.sandbox.plain_user", sys.executable)
STILL_ROOT = ("-m", "tests.unit.sandbox.plain_user", "--still-root", sys.executable)


def printed(program: str, *arguments: str, become: Sequence[str] = ()) -> str:
    """What a program prints, which must end well."""
    done = subprocess.run(
        [sys.executable, *become, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


SOON_S = 60.0  # for a jail to begin on a busy host
ZYGOTE = 1  # Python process of a launcher without jails
JAIL = 2  # Python processes of a jail: its keeper and its guest


def programs_below(pid: int) -> list[str]:
    """What runs in the processes that a process has started, and in theirs."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the two looks
            found.append(process.name())
    return found


def pythons(launcher: JailLauncher) -> list[str]:
    """The Python processes inside of its outer jail: those of jails, and the zygote."""
    return [name for name in programs_below(launcher.pid) if name.startswith("python")]


async def guests_run(launcher: JailLauncher, jails: int = 1) -> None:
    """Returns once the programs of so many jails have been started."""
    async with asyncio.timeout(scaled(SOON_S)):
        while len(pythons(launcher)) < ZYGOTE + jails * JAIL:
            await asyncio.sleep(0.005)


LEFT_OUT = ("site-packages", "test", "idlelib", "__pycache__", "config-*", "ensurepip", "tkinter")


def image(root: Path) -> str:
    """Fills `root`; returns the interpreter's path inside. A module `only_here` is installed."""
    python = os.path.realpath(Interpreter.default().python)
    library = Path(sysconfig.get_path("stdlib"))
    _put(root, python)
    for extension in (library / "lib-dynload").glob("*.so"):
        if extension.name.startswith(("_ctypes", "_struct", "_json", "_posixsubprocess", "select")):
            _libraries(root, str(extension))
    target = root / str(library).lstrip("/")
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(library, target, ignore=ignore, copy_function=_link)
    packages = _packages(root, python)
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "only_here.py").write_text("WORD = 'of the image'\n")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "secret-name").write_text("image\n")
    for place in (root, *root.rglob("*")):
        if place.is_dir() and not place.is_symlink():
            place.chmod(0o755)
    return python


def _packages(root: Path, python: str) -> Path:
    """Where that interpreter looks for packages; Debian's does so elsewhere."""
    code = "import site; print(site.getsitepackages()[-1])"
    said = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return root / said.stdout.strip().lstrip("/")


def _put(root: Path, program: str) -> None:
    _copy(root, program)
    _libraries(root, program)


def _libraries(root: Path, program: str) -> None:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        for word in line.split():
            if word.startswith("/"):
                _copy(root, word)


def _copy(root: Path, place: str) -> None:
    target = root / place.lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(place), target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # of another file system
        shutil.copy(source, target)


if __name__ == "__main__":
    print(image(Path(sys.argv[1])))
